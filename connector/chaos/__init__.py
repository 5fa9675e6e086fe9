"""`dfirst chaos`: real engines, broken on purpose, and an account of everything that came of it.

Two halves. The switch (`switch`, `orders`, `channel`, `engine`) runs in a worker of an engine under test and
puts faults between the connector and its socket, or its Mooncake engine. The bench (`plan`, `run` and what
they use) runs outside: it starts engines and a router, drives a load, orders the faults, and counts.
"""
