"""The engine: the scheduler coroutine on the event loop, and the step thread."""

from service.engine.build import make_engine, make_scheduler, start_step_thread
from service.engine.engine import Engine, StepObserver
from service.engine.step_thread import StepThread

__all__ = ["Engine", "StepObserver", "StepThread", "make_engine", "make_scheduler", "start_step_thread"]
