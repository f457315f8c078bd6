"""A deterministic simulation: real workers, modelled Kafka and Redis, one virtual time, one seed for all random parts.

    python -m tests.sim --schedules 10000      run so many and name the seeds that break a guarantee
    python -m tests.sim --seed 17 --trace      replay one, with all that the servers see and the workers log

`loop` is the time and the processes in it, `network` the connections. `broker`, `group` and `redis_server` are the
servers; `kafka_clients`, `kafka_consumer`, `kafka_coordinator` and `redis_clients` take the place of aiokafka and
redis-py; `worker` is the product's worker with these parts. `workload` and `faults` draw what a schedule has, `fleet`
and `injector` make it happen, `world` runs it. `auditor`, `stream_audit`, `ownership` and `decoding` judge it, and
`controls` switch mechanisms of the product off to show that the judges notice.
"""
