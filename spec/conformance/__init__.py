"""The parts of the conformance check: what is read, what is remembered of it, and the rules that it is
held against.

``table`` holds the rules as data, ``files`` reads traces, ``replay`` walks through one file with
``picture`` (what the rank looks like by now), ``causes`` (what may happen now), ``debts`` (what has to be
said yet), ``dues`` (what has to be heard) and ``guards``; ``between`` and ``expected`` hold the files
against each other.
"""
