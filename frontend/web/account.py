"""Signing in and out, and choosing the organization to look at."""

from __future__ import annotations

from django import forms
from django.contrib.auth.forms import AuthenticationForm
from django.contrib.auth.views import LoginView
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_POST

from backend.tenants.access import Actor, user_actor
from frontend.web.doors import SESSION_ORGANIZATION, for_members


class SignInForm(AuthenticationForm):
    username = forms.EmailField(
        label="E-mail",
        widget=forms.EmailInput(attrs={"class": "input", "autocomplete": "email", "autofocus": True}),
    )
    password = forms.CharField(
        label="Password",
        strip=False,
        widget=forms.PasswordInput(attrs={"class": "input", "autocomplete": "current-password"}),
    )
    error_messages = {
        "invalid_login": "No account has this e-mail address and password.",
        "inactive": "This account is switched off.",
    }


class SignIn(LoginView):
    template_name = "web/sign_in.html"
    authentication_form = SignInForm
    redirect_authenticated_user = True


@require_POST
@for_members
def switch_organization(request: HttpRequest, actor: Actor) -> HttpResponse:
    """Look at another organization of the person's; ``NotFound`` for any other."""
    chosen = user_actor(user=request.user, slug=request.POST.get("organization", ""))
    request.session[SESSION_ORGANIZATION] = chosen.organization.slug
    return redirect("web:jobs")
