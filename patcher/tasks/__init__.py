"""Tasks for training: modules composed of PyTorch's operators, filtered, written as ops."""

from patcher.tasks.create import CreatedTasks, TaskOptions, create_tasks
from patcher.tasks.records import Split, Task, load_tasks

__all__ = ["CreatedTasks", "Split", "Task", "TaskOptions", "create_tasks", "load_tasks"]
