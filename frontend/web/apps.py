from django.apps import AppConfig


class WebConfig(AppConfig):
    name = "frontend.web"
    label = "web"
