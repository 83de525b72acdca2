"""Predictions for a run that has not started: memory, traffic, time, disk. Imports no torch.

    traffic      bytes on each process group in a step
    site         facts about a machine
    seconds      the time of a step on a machine; timeline: the time of a pipeline schedule
    updates      the time of all-reduces and optimizer updates
    plan         all figures of one configuration; fit: the nearest configuration that fits;
                 report: the figures as text
    simulation   a step event by event; course: its operations; drawing: the step as a picture
    replay       the runs of the papers, simulated
    samo_equations, paper_accounting
                 memory by the equations of the SAMO paper, and by the rules of Sohoni et al. 2019
    ledger_report
                 the memory ledger of a step (`megatron.low_memory.ledger`) as text and as pictures

`tools/plan.py`, `tools/simulate.py` and `tools/profile_memory.py` are the commands.
"""
