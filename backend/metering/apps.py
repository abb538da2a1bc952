from django.apps import AppConfig


class MeteringConfig(AppConfig):
    name = "backend.metering"
    label = "metering"
