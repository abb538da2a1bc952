from django.apps import AppConfig


class CatalogConfig(AppConfig):
    name = "backend.catalog"
    label = "catalog"
