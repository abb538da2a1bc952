"""Capacity over times in service: what was one instant per device becomes its first, open interval."""

import django.db.models.deletion
from django.db import migrations, models


def begin_intervals(apps, schema_editor):
    Device = apps.get_model("pool", "Device")
    ServiceInterval = apps.get_model("pool", "ServiceInterval")
    ServiceInterval.objects.bulk_create(
        ServiceInterval(device_id=pk, start=start) for pk, start in Device.objects.values_list("pk", "in_service_at")
    )


class Migration(migrations.Migration):
    dependencies = [("pool", "0001_initial")]

    operations = [
        migrations.CreateModel(
            name="ServiceInterval",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("start", models.DateTimeField()),
                ("end", models.DateTimeField(null=True)),
                (
                    "device",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="service_intervals",
                        to="pool.device",
                    ),
                ),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(
                        condition=models.Q(("end__isnull", True)),
                        fields=("device",),
                        name="service_one_open_per_device",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("end__isnull", True), ("end__gte", models.F("start")), _connector="OR"),
                        name="service_ends_after_start",
                    ),
                ],
            },
        ),
        migrations.RunPython(begin_intervals, migrations.RunPython.noop, elidable=True),
        migrations.RemoveField(model_name="device", name="in_service_at"),
    ]
