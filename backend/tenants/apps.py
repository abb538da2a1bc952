from django.apps import AppConfig


class TenantsConfig(AppConfig):
    name = "backend.tenants"
    label = "tenants"
