"""The console's pages, fragments and streams."""

from __future__ import annotations

from django.contrib.auth.views import LogoutView
from django.urls import path
from django.views.generic import RedirectView

from frontend.web import account, cluster, downloads, keys, new_job, pages, streams

app_name = "web"

urlpatterns = [
    path("", RedirectView.as_view(pattern_name="web:jobs"), name="home"),
    path("sign-in", account.SignIn.as_view(), name="sign_in"),
    path("sign-out", LogoutView.as_view(), name="sign_out"),
    path("organization", account.switch_organization, name="switch_organization"),
    path("jobs", pages.jobs, name="jobs"),
    path("jobs/rows", pages.job_rows, name="job_rows"),
    path("jobs/stream", streams.jobs_stream, name="jobs_stream"),
    path("jobs/new", new_job.new_job, name="new_job"),
    path("jobs/new/preview", new_job.preview, name="new_job_preview"),
    path("files", new_job.upload, name="upload"),
    path("jobs/<slug:job_id>", pages.job, name="job"),
    path("jobs/<slug:job_id>/stream", streams.job_stream, name="job_stream"),
    path("jobs/<slug:job_id>/header", pages.job_header, name="job_header"),
    path("jobs/<slug:job_id>/points", pages.job_points, name="job_points"),
    path("jobs/<slug:job_id>/figures", pages.job_figures, name="job_figures"),
    path("jobs/<slug:job_id>/timeline", pages.job_timeline_figure, name="job_timeline"),
    path("jobs/<slug:job_id>/samples", pages.job_samples_part, name="job_samples"),
    path("jobs/<slug:job_id>/checkpoints", pages.job_checkpoints_part, name="job_checkpoints"),
    path("jobs/<slug:job_id>/cost", pages.job_cost_part, name="job_cost"),
    path("jobs/<slug:job_id>/cancel", pages.cancel, name="job_cancel"),
    path("jobs/<slug:job_id>/checkpoints/<slug:checkpoint_id>.tar", downloads.checkpoint, name="checkpoint"),
    path("keys", keys.keys, name="keys"),
    path("keys/<int:key_id>/revoke", keys.revoke, name="key_revoke"),
    path("cluster", cluster.cluster, name="cluster"),
    path("cluster/live", cluster.cluster_live, name="cluster_live"),
]
