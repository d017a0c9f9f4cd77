"""Stages of a deep model that learn at the same time, each from its own loss, in threads or in processes.

Reads from ``stage`` (one stage's mathematics) through ``worker`` (what it does with an order) to ``threads`` and
``processes`` (who carries the orders), behind the one contract of ``base``.
"""
