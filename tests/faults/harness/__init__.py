"""Runs workers under faults and judges what they leave behind, by the guarantees alone.

`jobs` says what is sent, `ledger` what was acknowledged, `testbed` runs the service, `auditor` reads every trace with
plain clients, `invariants` compares them, `catalogue` lists the faults, `directed` the pairs of a point in the code and
an event. Only `worker_process`, `points` and `without`, which run inside a worker, import the product.
"""
