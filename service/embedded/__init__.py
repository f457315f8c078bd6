"""A Kafka-protocol broker and a Redis-compatible server from wheels, on loopback, in memory only."""
