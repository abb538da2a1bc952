"""Which files are in view."""

from workers.sandbox.view import View, outermost, split


def test_what_lies_in_another_folder_is_named_once():
    assert outermost(["/usr/lib", "/usr/lib/x", "/usr/library", "/usr/lib"]) == ("/usr/lib", "/usr/library")


def test_a_hidden_folder_splits_those_above_it(tmp_path):
    for name in ("lib/python/site-packages", "lib/python/json", "lib/other"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "lib/python/os.py").touch()
    at = str(tmp_path)
    seen = View((f"{at}/lib", "/etc/localtime"), (f"{at}/lib/python/site-packages",))
    assert split(seen) == (
        sorted(["/etc/localtime", f"{at}/lib/other", f"{at}/lib/python/json", f"{at}/lib/python/os.py"]),
        [f"{at}/lib", f"{at}/lib/python"],
    )
