from django.apps import AppConfig


class PoolConfig(AppConfig):
    name = "backend.pool"
    label = "pool"
