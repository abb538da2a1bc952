from django.apps import AppConfig


class CommonConfig(AppConfig):
    name = "backend.common"
    label = "common"
