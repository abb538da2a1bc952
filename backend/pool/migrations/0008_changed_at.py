from django.db import migrations, models
from django.db.models import Max
from django.db.models.functions import Greatest


def changed(apps, schema_editor):
    """Of each device the newest change that is not in the ledger yet."""
    devices = apps.get_model("pool", "Device").objects
    open_books = apps.get_model("pool", "Allotment").objects.filter(substage__metered=False)
    last = open_books.values("device_id").annotate(at=Greatest(Max("start"), Max("end"))).order_by()
    for row in last:
        devices.filter(pk=row["device_id"]).update(changed_at=row["at"])


class Migration(migrations.Migration):

    dependencies = [
        ('pool', '0007_timelines'),
    ]

    operations = [
        migrations.AddField(
            model_name='device',
            name='changed_at',
            field=models.DateTimeField(
                help_text='last lock for a change of what computes here: nothing begins before', null=True
            ),
        ),
        migrations.RunPython(changed, migrations.RunPython.noop),
    ]
