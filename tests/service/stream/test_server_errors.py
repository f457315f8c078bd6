"""Who is at fault for an error reply: one job, whose key holds a foreign value, or the server or operator."""

import pytest
from redis._parsers.base import BaseParser

from service.stream.connection import concerns_one_job

IN_6_2 = "ERR Error running script (call to f_0a1b2c): @user_script:12: @user_script: 12: "
IN_7 = " script: 66bcf52fe55bdc48c881e1ee3a7f2ef5e02f943c, on @user_script:12."

OUTAGES = [
    "OOM command not allowed when used memory > 'maxmemory'.",
    f"OOM command not allowed when used memory > 'maxmemory'.{IN_7}",
    f"{IN_6_2}-OOM command not allowed when used memory > 'maxmemory'.",
    "READONLY You can't write against a read only replica.",
    f"READONLY You can't write against a read only replica.{IN_7}",
    f"{IN_6_2}-READONLY You can't write against a read only replica.",
    "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk.",
    f"{IN_6_2}-MISCONF Redis is configured to save RDB snapshots, but it is currently not able to",
    "MISCONF Errors writing to the AOF file: No space left on device",
    "NOREPLICAS Not enough good replicas to write.",
    f"{IN_6_2}-NOREPLICAS Not enough good replicas to write.",
    "NOPERM this user has no permissions to run the 'evalsha' command or its subcommand",
    "NOPERM User tailrace has no permissions to run the 'evalsha' command",
    "NOPERM No permissions to access a key",
    "NOPERM this user has no permissions to access one of the keys used as arguments",
    f"{IN_6_2}The user executing the script can't run this command or subcommand",
    f"{IN_6_2}The user executing the script can't access at least one of the keys mentioned",
    f"NOPERM The user executing the script can't run this command or subcommand{IN_7}",
    f"NOPERM The user executing the script can't publish to the channel mentioned in the command{IN_7}",
    "ERR ACL failure in script: User tailrace has no permissions to run the 'hincrby' command" + IN_7,
    "ERR ACL failure in script: No permissions to access a key" + IN_7,
    "ERR ACL failure in script: No permissions to access a channel" + IN_7,
    "NOAUTH Authentication required.",
    "NOSCRIPT No matching script. Please use EVAL.",
    "LOADING Redis is loading the dataset in memory",
    "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
    "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
    "CLUSTERDOWN Hash slot not served",
    "MOVED 3999 127.0.0.1:6381",
    "UNKILLABLE Sorry the script already executed write commands against the dataset.",
    "ERR unknown command 'EVALSHA', with args beginning with: '66bcf52fe55b', '3'",
    "ERR max number of clients reached",
]

OF_ONE_JOB = [
    "WRONGTYPE Operation against a key holding the wrong kind of value",
    f"WRONGTYPE Operation against a key holding the wrong kind of value{IN_7}",
    f"{IN_6_2}WRONGTYPE Operation against a key holding the wrong kind of value",
    "WRONGTYPE the epoch is not a number",
    f"ERR hash value is not an integer{IN_7}",
    f"{IN_6_2}ERR hash value is not an integer",
    f"ERR increment or decrement would overflow{IN_7}",
    f"{IN_6_2}ERR increment or decrement would overflow",
    f"ERR The stream has exhausted the last possible ID, unable to add more items{IN_7}",
    f"{IN_6_2}ERR The stream has exhausted the last possible ID, unable to add more items",
    "ERR Error running script (call to f_0a): @user_script:20: user_script:20: attempt to compare number with nil",
    "ERR user_script:20: attempt to perform arithmetic on a nil value" + IN_7,
    "ERR user_script:20: attempt to compare nil with number" + IN_7,
]


def received(text: str) -> Exception:
    """As redis-py hands it on: it takes the codes that it knows off the text."""
    error: Exception = BaseParser.parse_error(text)  # type: ignore[no-untyped-call]
    return error


@pytest.mark.parametrize("text", OUTAGES)
def test_hazard_an_outage_taken_for_one_jobs_fault_would_refuse_every_job(text: str) -> None:
    assert not concerns_one_job(received(text))


@pytest.mark.parametrize("text", OF_ONE_JOB)
def test_hazard_one_foreign_key_taken_for_an_outage_would_stop_all_jobs(text: str) -> None:
    assert concerns_one_job(received(text))


@pytest.mark.parametrize("error", [ConnectionError("WRONGTYPE"), TimeoutError("value is not an integer")])
def test_only_a_reply_can_blame_a_key(error: Exception) -> None:
    assert not concerns_one_job(error)
