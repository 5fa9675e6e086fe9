"""The protocol core: machines, messages, leases, shards and the plan. It does no I/O and reads no clock."""
