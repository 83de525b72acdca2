"""A stand-in for matplotlib that cannot be imported; its folder comes first in PYTHONPATH.

The pictures of a report take a second to draw, and a program that starts cold cannot be told to
leave them out otherwise. `tests.program` needs no stand-in.
"""

raise ImportError("the programs that tests start draw no pictures")
