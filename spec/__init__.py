"""The protocol as data: machines, wire and timers, and the programs that draw and check them."""
