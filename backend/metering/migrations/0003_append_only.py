"""The ledger refuses changes from every writer, not only from those that go through the model."""

from django.db import migrations

CREATE = """
CREATE FUNCTION metering_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'metering_usagerecord is append-only: correct a row with a further row'
        USING ERRCODE = 'restrict_violation';
END
$$;
CREATE TRIGGER metering_usagerecord_append_only
    BEFORE UPDATE OR DELETE ON metering_usagerecord
    FOR EACH ROW EXECUTE FUNCTION metering_append_only();
"""

DROP = """
DROP TRIGGER metering_usagerecord_append_only ON metering_usagerecord;
DROP FUNCTION metering_append_only();
"""


class Migration(migrations.Migration):
    dependencies = [("metering", "0002_corrections")]

    operations = [migrations.RunSQL(CREATE, DROP)]
