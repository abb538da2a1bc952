// The new-job form: settings that follow the dataset until they are changed by hand, checks and the API call
// while typing, and the upload.

const form = document.getElementById("new-job");
const { suitable, plain, about, graders, learning_rates } = JSON.parse(document.getElementById("page-data").textContent);
const touched = new Set();
const data = form.elements.training_file;

// ---------------------------------------------------------------- settings that suit the dataset

function base() {
  return { ...plain, ...suitable[data.value] };
}

function inputsOf(path) {
  return [...form.querySelectorAll(`[name="${CSS.escape(path)}"]`)];
}

function put(path, value) {
  for (const input of inputsOf(path)) {
    if (input.type === "checkbox") input.checked = Array.isArray(value) ? value.includes(input.value) : value;
    else if (input.type === "radio") input.checked = input.value === value;
    else input.value = Array.isArray(value) ? value.map(escaped).join("\n") : (value ?? "");
  }
}

function escaped(text) {
  return text.replaceAll("\\", "\\\\").replaceAll("\n", "\\n");
}

function suit() {
  for (const [path, value] of Object.entries(base())) {
    if (!touched.has(path)) put(path, value);
    mark(path);
  }
  document.getElementById("about-data").textContent = about[data.value] ?? "";
  showVariant();
  showGrader();
}

function valueOf(path, like) {
  const inputs = inputsOf(path);
  if (Array.isArray(like) && inputs[0].type !== "checkbox") return inputs[0].value;
  if (Array.isArray(like)) return inputs.filter((input) => input.checked).map((input) => input.value).join("\n");
  if (inputs[0].type === "checkbox") return inputs[0].checked;
  if (inputs[0].type === "radio") return inputs.find((input) => input.checked)?.value;
  return inputs[0].value.trim();
}

// Whether the input says something else than what the job would have anyway; empty asks for just that.
function differs(path) {
  const usual = base()[path];
  if (!inputsOf(path).length) return false;
  const value = valueOf(path, usual);
  if (typeof usual === "number") return value !== "" && Number(value) !== usual;
  return value !== (Array.isArray(usual) ? usual.map(escaped).join("\n") : (usual ?? ""));
}

function mark(path) {
  form.querySelector(`[data-knob="${CSS.escape(path)}"]`)?.classList.toggle("changed", differs(path));
}

// ---------------------------------------------------------------- parts that depend on a choice

function showVariant() {
  for (const variant of form.querySelectorAll("[data-variant]")) {
    const { union, variant: tag } = variant.dataset;
    variant.hidden = tag !== form.querySelector(`[name="${union}.type"]:checked`)?.value;
    variant.disabled = variant.hidden;
  }
}

function suitRate() {
  const path = "rl.optimizer.learning_rate";
  const chosen = form.querySelector('[name="rl.tuning.type"]:checked').value;
  if (touched.has(path)) return;
  put(path, base()["rl.tuning.type"] === chosen ? base()[path] : learning_rates[chosen]);
}

function showGrader() {
  const known = graders[data.value];
  const choice = form.querySelector('[name="grader_from"][value="dataset"]');
  choice.disabled = !known;
  if (!known && choice.checked) form.querySelector('[name="grader_from"][value="json"]').checked = true;
  const from = form.querySelector('[name="grader_from"]:checked').value;
  for (const part of form.querySelectorAll("[data-grader]")) part.hidden = part.dataset.grader !== from;
  document.getElementById("dataset-grader").textContent = known
    ? known.type === "python" ? known.source : JSON.stringify(known, null, 2)
    : "";
}

// ---------------------------------------------------------------- checks and the API call

let timer = null;
let latest = 0;

function checkSoon() {
  clearTimeout(timer);
  timer = setTimeout(check, 350);
}

async function check() {
  const mine = ++latest;
  const answer = await fetch(form.dataset.preview, { method: "POST", body: new FormData(form) });
  if (!answer.ok || answer.redirected || mine !== latest) return;
  const { errors, curl, sums } = await answer.json();
  document.getElementById("curl").textContent = curl;
  showSums(sums);
  for (const place of form.querySelectorAll("[data-error-for]")) {
    const said = errors[place.dataset.errorFor] ?? "";
    place.textContent = said;
    place.closest(".field")?.classList.toggle("invalid", Boolean(said));
  }
  const count = Object.keys(errors).length;
  document.getElementById("form-state").textContent = count ? `${count} field${count > 1 ? "s" : ""} to correct: ${Object.keys(errors).join(", ")}` : "";
}

function showSums(sums) {
  const list = document.getElementById("sums");
  list.replaceChildren();
  for (const [name, value] of Object.entries(sums)) {
    const term = document.createElement("dt");
    const number = document.createElement("dd");
    term.textContent = name;
    number.textContent = value;
    list.append(term, number);
  }
}

form.addEventListener("input", (event) => {
  const { name } = event.target;
  if (name.startsWith("rl.")) {
    touched.add(name);
    mark(name);
  }
  if (name.endsWith(".type")) showVariant();
  if (name === "rl.tuning.type") suitRate();
  if (name === "training_file") suit();
  if (name === "grader_from") showGrader();
  checkSoon();
});

// ---------------------------------------------------------------- upload

const upload = document.getElementById("upload");
const progress = document.getElementById("upload-progress");
const complaint = document.getElementById("upload-error");

upload.addEventListener("change", () => {
  const [file] = upload.files;
  if (!file) return;
  const body = new FormData();
  body.append("file", file);
  const request = new XMLHttpRequest();
  request.open("POST", form.dataset.upload);
  request.setRequestHeader("X-CSRFToken", form.elements.csrfmiddlewaretoken.value);
  request.responseType = "json";
  request.upload.onprogress = (event) => (progress.value = event.total ? event.loaded / event.total : 0);
  request.onload = () => uploaded(request);
  request.onerror = () => done("The upload did not get through. Try again.");
  complaint.textContent = "";
  progress.value = 0;
  progress.hidden = false;
  request.send(body);
});

function done(said) {
  progress.hidden = true;
  complaint.textContent = said;
  upload.value = "";
}

function uploaded(request) {
  if (request.status !== 201) {
    done(request.response?.error ?? `The server refused the file (${request.status}).`);
    return;
  }
  const { id, filename, rows } = request.response;
  document.getElementById("own-files").prepend(new Option(`${filename} · ${rows} rows`, id));
  data.value = id;
  done("");
  suit();
  checkSoon();
}

// Values that the server sent back after a refusal are the person's own.
for (const path of Object.keys(base())) {
  if (differs(path)) touched.add(path);
  mark(path);
}
suit();
check();
