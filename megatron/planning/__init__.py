"""What a run will take, before it is started: memory, traffic, time, disk. Loads no torch.

layout        what each rank of a grid holds, by logical name
state         bytes of parameters, gradients, master weights, moments and a path's own state
activations   bytes that backward waits for, by layer, recomputation and schedule
traffic       bytes on each group in a step
site          facts of a machine; seconds: what a step takes there
plan          all of it for one configuration; fit: the nearest that fits; report: as text
"""
