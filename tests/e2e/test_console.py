"""The console in a real Chromium against a real uvicorn: a person signs in and watches a job live.

The test process plays the scheduler: it writes steps, samples, sub-stages and events through the services,
and the page follows by its stream alone.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from django.db import connection
from django.utils import timezone
from playwright.sync_api import Browser, Page, expect, sync_playwright

from backend.jobs.attempts import attempt_succeed, step_record
from backend.jobs.events import event_add
from backend.jobs.models import Attempt, Event, Job
from backend.pool.models import Device
from backend.tenants.models import Membership, Organization, Role, User
from infra.embedded.paths import PROJECT
from tests import factories
from tests.frontend import stage

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

PICTURES = PROJECT / "var" / "screenshots"
#: A pinned set: no sandbox (CI runs as root), no GPU, and nothing that calls home.
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
START_S = 60
LIVE_MS = 15_000
#: Plotly follows the window a moment later.
PLOTS_FIT = """() => [...document.querySelectorAll('.plot .main-svg')].every(
    (svg) => Math.abs(svg.clientWidth - svg.closest('.plot').clientWidth) < 2
)"""
WIDE, NARROW = {"width": 1440, "height": 900}, {"width": 380, "height": 800}


# ---------------------------------------------------------------- a server and a browser


@pytest.fixture(scope="module", autouse=True)
def orm_beside_playwright() -> Iterator[None]:
    """Playwright's synchronous interface runs an event loop in this thread, which Django would refuse."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")
        yield


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    path = os.environ.get("CHROME") or next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if path is None:
        pytest.skip("no Chromium: set CHROME to one, or install it (Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield browser
        browser.close()


@dataclass
class Server:
    """uvicorn on the test database. The listening socket is ours, so that a restart keeps the address."""

    listener: socket.socket
    environment: dict[str, str]
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def start(self) -> None:
        descriptor = self.listener.fileno()
        command = [sys.executable, "-m", "uvicorn", "backend.asgi:application", "--fd", str(descriptor)]
        command += ["--timeout-graceful-shutdown", "2", "--log-level", "warning"]
        self.process = subprocess.Popen(command, pass_fds=[descriptor], env=self.environment, cwd=PROJECT)
        self._wait()

    def _wait(self) -> None:
        """The socket listens before the server does: the first answer says that it is up."""
        deadline = time.monotonic() + START_S
        while True:
            assert self.process is not None and self.process.poll() is None, "uvicorn ended"
            try:
                urllib.request.urlopen(f"{self.address}/sign-in", timeout=START_S).close()
                return
            except urllib.error.URLError:
                assert time.monotonic() < deadline, f"no answer within {START_S} s"

    def stop(self) -> None:
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(timeout=15)


@pytest.fixture(scope="module")
def server(
    django_db_setup: None, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("console")
    place = connection.settings_dict
    database = f"postgresql://{quote(place['USER'])}@/{quote(place['NAME'])}?host={quote(place['HOST'])}"
    database += "&application_name=console"
    if place["PORT"]:
        database += f"&port={place['PORT']}"
    folders = {
        f"JIGSAW_{name}_DIR": str(folder / name.lower()) for name in ("FILES", "MODELS", "CHECKPOINTS")
    }
    environment = {
        **os.environ,
        **folders,
        "DATABASE_URL": database,
        "REDIS_URL": redis_url,
        "DJANGO_SETTINGS_MODULE": "backend.settings",
    }
    if place["PASSWORD"]:
        environment["PGPASSWORD"] = place["PASSWORD"]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        started = Server(listener, environment)
        try:
            started.start()
            yield started
        finally:
            started.stop()


@dataclass
class Complaints:
    """What a page must not do: log an error, fail a request, ask another host."""

    said: list[str] = field(default_factory=list)

    def watch(self, page: Page, address: str) -> None:
        def asked(url: str) -> None:
            if not url.startswith((address, "data:", "blob:")):
                self.said.append(f"asked for {url}")

        page.on("console", lambda m: self.said.append(m.text) if m.type in {"error", "warning"} else None)
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("request", lambda request: asked(request.url))


@dataclass
class Seat:
    """A person in front of the console, with a job that has trained three steps."""

    page: Page
    address: str
    complaints: Complaints
    user: User
    organization: Organization
    job: Job
    attempt: Attempt
    devices: list[Device]
    at: object

    def open(self, path: str) -> None:
        self.page.goto(f"{self.address}{path}")

    def train(self, steps: int) -> None:
        """The job trains further steps; the page is not told but by the stream."""
        self.attempt.refresh_from_db()
        self.job.refresh_from_db()
        for step in range(self.job.steps_done, self.job.steps_done + steps):
            self.at = stage.run_step(self.attempt, step, self.devices, self.at)

    def points(self, chart: str) -> int:
        return self.page.evaluate(
            "key => document.querySelector(`[data-chart=${key}]`).data?.at(-1).x.length ?? 0", chart
        )

    def wait_for_points(self, chart: str, number: int) -> None:
        self.page.wait_for_function(
            "([key, n]) => document.querySelector(`[data-chart=${key}]`).data?.at(-1).x.length === n",
            arg=[chart, number],
            timeout=LIVE_MS,
        )

    def is_wider_than_the_screen(self) -> bool:
        return self.page.evaluate(
            "document.documentElement.scrollWidth > document.documentElement.clientWidth"
        )


@pytest.fixture
def seat(transactional_db: None, chromium: Browser, server: Server, tmp_path: Path) -> Iterator[Seat]:
    organization = factories.organization("Acme")
    user = factories.user("ada@example.com", factories.PASSWORD)
    Membership.objects.create(organization=organization, user=user, role=Role.MEMBER)
    job = factories.job(organization, tmp_path, name="Lighthouse sentences")
    factories.dataset(tmp_path, "sums")
    start = timezone.now() - timedelta(minutes=10)
    devices = stage.devices(2, start)
    attempt = stage.admit(job, devices)
    context = chromium.new_context(viewport=WIDE)
    page = context.new_page()
    complaints = Complaints()
    complaints.watch(page, server.address)
    seated = Seat(page, server.address, complaints, user, organization, job, attempt, devices, start)
    seated.train(3)
    sign_in(seated)
    yield seated
    context.close()
    wait_until_nobody_reads()
    assert complaints.said == []


def wait_until_nobody_reads() -> None:
    """The tables are emptied after the test; a stream's last read must not stand in the way."""
    deadline = time.monotonic() + 15
    with connection.cursor() as cursor:
        while True:
            cursor.execute(
                "SELECT application_name, state, query FROM pg_stat_activity "
                "WHERE datname = current_database() AND application_name IN ('console', 'jigsaw-hub')"
            )
            others = cursor.fetchall()
            if not others:
                return
            assert time.monotonic() < deadline, others


def sign_in(seat: Seat) -> None:
    seat.open("/jobs")
    seat.page.get_by_label("E-mail").fill(seat.user.email)
    seat.page.get_by_label("Password").fill(factories.PASSWORD)
    seat.page.get_by_role("button", name="Sign in").click()
    seat.page.wait_for_url("**/jobs")


# ---------------------------------------------------------------- journeys


def test_a_person_watches_a_job_live(seat: Seat, tmp_path: Path):
    page = seat.page
    expect(page.locator("[data-live]")).to_have_text("Live", timeout=LIVE_MS)
    row = page.locator("tr", has_text="Lighthouse sentences")
    expect(row).to_contain_text("3 / 30 steps")
    seat.train(1)
    expect(row).to_contain_text("4 / 30 steps", timeout=LIVE_MS)
    newer = factories.job(seat.organization, tmp_path, name="a newer one")
    event_add(job=newer, type=Event.Type.MESSAGE, message="hello")
    expect(page.locator("tbody tr").first).to_contain_text("a newer one", timeout=LIVE_MS)

    row.get_by_role("link").click()
    page.wait_for_url(f"**/jobs/{seat.job.public_id}")
    expect(page.locator("[data-live]")).to_have_text("Live", timeout=LIVE_MS)
    page.evaluate("window.notReloaded = true")
    seat.wait_for_points("reward", 4)

    seat.train(2)
    for chart in ("reward", "loss", "kl", "entropy", "completion_length", "tokens_per_s", "cost", "mismatch"):
        seat.wait_for_points(chart, 6)
    expect(page.locator("#job-header")).to_contain_text("6 of 30 steps", timeout=LIVE_MS)

    page.get_by_role("tab", name="Samples").click()
    expect(page.locator("#samples")).to_contain_text("The old lighthouse keeper", timeout=LIVE_MS)
    expect(page.locator("#samples .groups")).to_have_attribute("data-step", "5")
    seat.train(1)
    expect(page.locator("#samples .groups")).to_have_attribute("data-step", "6", timeout=LIVE_MS)
    page.get_by_role("button", name="Step before").click()
    expect(page.locator("#samples .groups")).to_have_attribute("data-step", "5", timeout=LIVE_MS)

    page.get_by_role("tab", name="Timeline").click()
    page.locator("label", has_text="All").click()
    bars = "() => document.getElementById('timeline-plot').data?.reduce((n, t) => n + t.x.length, 0)"
    page.wait_for_function(f"{bars} === {7 * len(stage.STEP) * len(seat.devices)}", timeout=LIVE_MS)
    seat.train(1)
    page.wait_for_function(f"{bars} === {8 * len(stage.STEP) * len(seat.devices)}", timeout=LIVE_MS)

    page.get_by_role("tab", name="Checkpoints").click()
    folder = tmp_path / "step-8"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    stage.save_checkpoint(seat.attempt, 8, str(folder), final=True)
    expect(page.locator("#checkpoints")).to_contain_text("After 8 steps", timeout=LIVE_MS)
    with page.expect_download() as download:
        page.get_by_role("link", name="Download").click()
    assert download.value.suggested_filename == f"{seat.job.public_id}-step-8.tar"

    page.get_by_role("tab", name="Events").click()
    expect(page.locator("#event-list")).to_contain_text("Checkpoint at step 8 saved.")
    seat.attempt.refresh_from_db()
    attempt_succeed(attempt=seat.attempt, stimulus="test")
    expect(page.locator("[data-status]")).to_have_text("Succeeded", timeout=LIVE_MS)
    expect(page.locator("[data-live]")).to_have_text("Finished", timeout=LIVE_MS)
    assert page.evaluate("window.notReloaded")


def test_what_happened_while_the_server_was_away_is_caught_up(seat: Seat, server: Server):
    seat.open(f"/jobs/{seat.job.public_id}")
    expect(seat.page.locator("[data-live]")).to_have_text("Live", timeout=LIVE_MS)
    seat.wait_for_points("reward", 3)
    server.stop()
    seat.train(2)
    expect(seat.page.locator("[data-live]")).to_have_text("Reconnecting", timeout=LIVE_MS)
    server.start()
    seat.wait_for_points("reward", 5)
    expect(seat.page.locator("[data-live]")).to_have_text("Live", timeout=LIVE_MS)
    # The refused connections are the browser's to report; nothing else is.
    seat.complaints.said[:] = [said for said in seat.complaints.said if "ERR_" not in said]


def test_a_page_left_open_does_not_grow(seat: Seat):
    seat.open(f"/jobs/{seat.job.public_id}#events")
    expect(seat.page.locator("[data-live]")).to_have_text("Live", timeout=LIVE_MS)
    for number in range(150):
        event_add(job=seat.job, type=Event.Type.MESSAGE, message=f"message {number}")
    rows = seat.page.locator("#event-list li[data-type=message]")
    expect(rows.first).to_contain_text("message 149", timeout=LIVE_MS)
    expect(rows).to_have_count(60)


def test_a_job_is_created_with_checks_while_typing(seat: Seat):
    page = seat.page
    page.get_by_role("link", name="New job").first.click()
    expect(page.locator("#curl")).to_contain_text('"training_file": "sums"', timeout=LIVE_MS)
    expect(page.locator("#curl")).not_to_contain_text("group_size")
    page.get_by_label("Group size").fill("1")
    expect(page.locator('[data-error-for="rl.group_size"]')).to_contain_text(
        "must be at least 2 with algorithm grpo", timeout=LIVE_MS
    )
    page.get_by_label("Group size").fill("6")
    expect(page.locator('[data-error-for="rl.group_size"]')).to_be_empty(timeout=LIVE_MS)
    expect(page.locator("#curl")).to_contain_text('"group_size": 6', timeout=LIVE_MS)
    expect(page.locator("#sums")).to_contain_text("24")
    page.locator("label", has_text="Every weight").click()
    expect(page.get_by_label("Learning rate")).to_have_attribute("placeholder", "1e-05", timeout=LIVE_MS)
    page.locator("label", has_text="LoRA adapter").click()
    page.get_by_label("Name", exact=True).fill("from the browser")
    page.get_by_role("button", name="Create job").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("from the browser", timeout=LIVE_MS)
    job = Job.objects.get(name="from the browser")
    assert (job.spec["rl"]["group_size"], job.spec["rl"]["tuning"]["type"]) == (6, "lora")
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Cancel job").click()
    expect(page.locator("[data-status]")).to_have_text("Cancelled", timeout=LIVE_MS)


def test_the_form_follows_the_algorithm(seat: Seat):
    page = seat.page
    seat.open("/jobs/new")
    chosen = page.get_by_label("Algorithm", exact=True)
    expect(page.get_by_label("Clip high")).to_have_attribute("placeholder", "0.2", timeout=LIVE_MS)
    chosen.select_option("dapo")
    expect(page.get_by_label("Clip high")).to_have_attribute("placeholder", "0.28", timeout=LIVE_MS)
    page.get_by_label("Longest completion").or_(page.get_by_label("Max tokens")).fill("50")
    expect(page.get_by_label("Overlong buffer")).to_have_attribute("placeholder", "10", timeout=LIVE_MS)
    expect(page.get_by_role("heading", name="Value head")).to_be_hidden()
    page.get_by_label("Temperature").fill("0.7")
    chosen.select_option("sft")
    for name in ("Grader", "Environment", "Steps", "Value head"):
        expect(page.get_by_role("heading", name=name, exact=True)).to_be_hidden()
    expect(page.get_by_label("Temperature")).to_be_hidden()
    expect(page.get_by_label("Learning rate")).to_have_attribute("placeholder", "0.0002", timeout=LIVE_MS)
    expect(page.locator("#curl")).to_contain_text('"algorithm": "sft"', timeout=LIVE_MS)
    expect(page.locator("#curl")).not_to_contain_text("temperature")
    chosen.select_option("ppo")
    expect(page.get_by_role("heading", name="Value head")).to_be_visible()
    # What was typed comes back with the input.
    expect(page.get_by_label("Temperature")).to_have_value("0.7")
    expect(page.locator("#curl")).to_contain_text('"temperature": 0.7', timeout=LIVE_MS)

    environment = page.locator('[data-world="environment"]')
    environment.locator("label", has_text="JSON").first.click()
    environment.get_by_label("Begin with an example").select_option("tools")
    expect(page.locator("#environment_json")).to_have_value(re.compile("calculator"))
    page.locator("#environment_json").fill('{"type": "guessing_game", "max_turns": 0}')
    expect(page.locator('[data-error-for="environment"]')).to_contain_text("max_turns", timeout=LIVE_MS)


def test_a_file_is_uploaded_in_the_form(seat: Seat, tmp_path: Path):
    page = seat.page
    seat.open("/jobs/new")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"messages": [{"role": "user", "content": "hi"}]}\nnot json\n')
    page.get_by_label("Upload JSONL").set_input_files(bad)
    expect(page.locator("#upload-error")).to_contain_text("ine 2", timeout=LIVE_MS)
    seat.complaints.said[:] = [said for said in seat.complaints.said if "400 (Bad Request)" not in said]
    good = factories.write_rows(tmp_path / "good.jsonl", factories.rows_with_answers(3))
    page.get_by_label("Upload JSONL").set_input_files(good)
    expect(page.locator("#training_file option:checked")).to_have_text("good.jsonl · 3 rows", timeout=LIVE_MS)
    expect(page.locator("#grader_json")).to_be_visible()


def test_a_key_is_made_used_and_revoked(seat: Seat):
    page = seat.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    be_owner(seat)
    page.get_by_role("link", name="API keys").first.click()
    page.get_by_label("Name").fill("laptop")
    page.get_by_label("Role").select_option("viewer")
    page.get_by_role("button", name="Create key").click()
    secret = page.locator("#secret").inner_text()
    page.locator("[data-copy='#secret']").click()
    expect(page.locator("[data-copy='#secret']")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == secret
    expect(page.locator("#first-call")).to_contain_text(f"export JIGSAW_URL={seat.address}\n")
    expect(page.locator("#first-call")).to_contain_text(f"export JIGSAW_API_KEY={secret}\n")

    def models() -> int:
        headers = {"Authorization": f"Bearer {secret}"}
        return httpx.get(f"{seat.address}/v1/models", headers=headers, timeout=30).status_code

    assert models() == 200
    page.reload()
    row = page.locator("tr", has_text="laptop")
    expect(row).to_have_count(1)
    expect(row).to_contain_text("Viewer")
    expect(row.get_by_title("UTC")).to_have_count(2)
    assert secret not in page.content()
    page.get_by_label("Name").fill("CI")
    page.get_by_role("button", name="Create key").click()
    expect(page.locator("#secret")).to_be_visible()
    seat.open("/jobs")
    page.go_back()
    expect(page.locator("tr", has_text="CI")).to_have_count(1)
    expect(page.locator("#secret")).to_have_count(0)

    page.once("dialog", lambda dialog: dialog.dismiss())
    row.get_by_role("button", name="Revoke").click()
    expect(row).to_contain_text("Valid")
    assert models() == 200
    page.once("dialog", lambda dialog: dialog.accept())
    row.get_by_role("button", name="Revoke").click()
    expect(row).to_contain_text("Revoked", timeout=LIVE_MS)
    expect(row.get_by_role("button")).to_have_count(0)
    assert models() == 401


def be_owner(seat: Seat) -> None:
    Membership.objects.filter(user=seat.user, organization=seat.organization).update(role=Role.OWNER)


def test_more_completions_are_a_click_away_and_stay(seat: Seat):
    page = seat.page
    seat.attempt.refresh_from_db()
    step, many = seat.attempt.job.steps_done, 100
    done = stage.step_done(step)
    samples = [done.samples[0].model_copy(update={"index": index}) for index in range(many)]
    step_record(attempt=seat.attempt, done=done.model_copy(update={"samples": tuple(samples)}))
    seat.open(f"/jobs/{seat.job.public_id}#samples")
    shown = page.locator("#samples .sample")
    expect(shown).to_have_count(64, timeout=LIVE_MS)
    expect(page.locator("#samples-newest")).to_be_disabled()
    page.get_by_role("button", name=f"Show more of step {step}").click()
    expect(shown).to_have_count(many, timeout=LIVE_MS)
    expect(page.get_by_role("button", name="Show more")).to_have_count(0)
    seat.train(1)
    expect(page.locator("#job-header")).to_contain_text(f"{step + 2} of", timeout=LIVE_MS)
    expect(shown).to_have_count(many)
    page.get_by_role("button", name="Newest step").click()
    expect(shown).to_have_count(stage.GROUP, timeout=LIVE_MS)
    expect(page.locator("#samples .groups")).to_have_attribute("data-step", str(step + 1))


def test_the_keyboard_reaches_everything_on_the_job_page(seat: Seat):
    page = seat.page
    seat.open(f"/jobs/{seat.job.public_id}")
    page.get_by_role("tab", name="Metrics").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Samples")).to_be_focused()
    expect(page.locator("#samples")).to_be_visible()
    page.keyboard.press("End")
    expect(page.locator("#configuration")).to_be_visible()
    assert page.url.endswith("#configuration")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_wide_and_narrow_screens_in_both_themes(seat: Seat, scheme: str):
    page = seat.page
    page.emulate_media(color_scheme=scheme)
    PICTURES.mkdir(parents=True, exist_ok=True)

    def look(name: str) -> None:
        for screen in (WIDE, NARROW):
            page.set_viewport_size(screen)
            page.wait_for_function(PLOTS_FIT, timeout=LIVE_MS)
            page.evaluate("scrollTo(0, 0)")
            assert not seat.is_wider_than_the_screen(), (name, screen)
            page.screenshot(path=PICTURES / f"{name}-{scheme}-{screen['width']}.png", full_page=True)

    look("jobs")
    seat.open("/jobs/new")
    expect(page.locator("#curl")).to_contain_text("curl", timeout=LIVE_MS)
    look("new-job")
    page.get_by_label("Algorithm", exact=True).select_option("ppo")
    for kind in ("grader", "environment"):
        page.locator(f'[data-world="{kind}"] label', has_text="JSON").first.click()
    expect(page.locator("#curl")).to_contain_text("ppo", timeout=LIVE_MS)
    look("new-job-ppo")
    page.get_by_label("Algorithm", exact=True).select_option("sft")
    expect(page.locator("#curl")).to_contain_text("sft", timeout=LIVE_MS)
    look("new-job-sft")
    seat.open(f"/jobs/{seat.job.public_id}")
    seat.wait_for_points("reward", 3)
    look("metrics")
    for tab in ("Samples", "Timeline", "Events", "Checkpoints", "Cost", "Configuration"):
        page.get_by_role("tab", name=tab).click()
        expect(page.locator(f"#{tab.lower()}")).not_to_contain_text("Loading", timeout=LIVE_MS)
        if tab == "Timeline":
            page.wait_for_function("() => document.getElementById('timeline-plot').data", timeout=LIVE_MS)
        look(tab.lower())

    User.objects.filter(pk=seat.user.pk).update(is_staff=True)
    seat.open("/cluster")
    look("cluster")
    User.objects.filter(pk=seat.user.pk).update(is_staff=False)

    seat.open("/keys")
    look("keys-of-a-member")
    be_owner(seat)
    for name in ("laptop", "nightly evaluation of the lighthouse sentences on the build machine"):
        factories.api_key(seat.organization)
        seat.open("/keys")
        page.get_by_label("Name").fill(name)
        page.get_by_role("button", name="Create key").click()
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Revoke laptop").click()
    expect(page.locator("tr", has_text="laptop")).to_contain_text("Revoked", timeout=LIVE_MS)
    look("keys")

    fresh = factories.organization("Fresh")
    Membership.objects.create(organization=fresh, user=seat.user, role=Role.MEMBER)
    seat.open("/keys")
    page.get_by_label("Organization").select_option("fresh")
    expect(page.get_by_role("heading", name="No jobs yet")).to_be_visible(timeout=LIVE_MS)
    look("no-jobs")
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible(timeout=LIVE_MS)
    look("sign-in")


def test_an_operator_watches_the_cluster_live(seat: Seat, tmp_path: Path):
    page = seat.page
    User.objects.filter(pk=seat.user.pk).update(is_staff=True)
    seat.open("/cluster")
    expect(page.locator("[data-device='node-a/cpu0']")).to_contain_text("Idle")
    drawn = "() => document.getElementById('cluster-plot').data?.[0].x.length ?? 0"
    before = page.evaluate(drawn)
    seat.at = timezone.now() - timedelta(seconds=stage.STEP_SECONDS)
    seat.train(1)
    page.wait_for_function(f"{drawn} > {before}", timeout=LIVE_MS)
    expect(page.locator("[data-live]")).to_have_text("Live")
    page.locator("label", has_text="24 h").click()
    expect(page.locator("[data-part=cluster_now]")).to_contain_text("over the last 24 h", timeout=LIVE_MS)


def test_the_theme_is_chosen_by_hand_and_kept(seat: Seat):
    page = seat.page
    page.emulate_media(color_scheme="light")
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    page.get_by_role("button", name="Switch between light and dark").click()
    dark = page.evaluate(paper)
    assert dark != light
    page.reload()
    assert page.evaluate(paper) == dark
