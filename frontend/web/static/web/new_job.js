// The new-job form: settings that follow the dataset until they are changed by hand, checks and the API call
// while typing, and the upload.

const form = document.getElementById("new-job");
const { suitable, plain, about, graders, environments, starts, examples } = JSON.parse(
  document.getElementById("page-data").textContent,
);
const RATE = "rl.optimizer.learning_rate";
const TUNING = "rl.tuning.type";
const touched = new Set();
const data = form.elements.training_file;
const algorithm = form.elements["rl.algorithm"];
const start = form.elements.start_from;

// ---------------------------------------------------------------- settings that suit the dataset

// What the job has unless it says otherwise. A checkpoint to start from brings how it was trained, and a rate
// is meant for one kind of tuning.
function base() {
  const own = suitable[data.value];
  const named = touched.has("rl.algorithm") ? algorithm.value : "";
  const settings = { ...(own ? { ...own[""], ...own[named] } : plain), ...starts[start.value] };
  const kind = touched.has(TUNING) ? valueOf(TUNING) : settings[TUNING];
  return own && own[""][TUNING] !== kind ? { ...settings, [RATE]: null } : settings;
}

function inputsOf(path) {
  return [...form.querySelectorAll(`[name="${CSS.escape(path)}"]`)];
}

function put(path, value) {
  for (const input of inputsOf(path)) {
    if (input.type === "checkbox") input.checked = Array.isArray(value) ? value.includes(input.value) : Boolean(value);
    else if (input.type === "radio") input.checked = input.value === value;
    else input.value = shown(value);
  }
}

function shown(value) {
  if (Array.isArray(value)) return value.map(escaped).join("\n");
  if (typeof value === "boolean") return value ? "yes" : "no";
  return value ?? "";
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
  showAlgorithm();
  showWorld("grader", graders);
  showWorld("environment", environments);
}

function valueOf(path, like) {
  const inputs = inputsOf(path);
  if (Array.isArray(like) && inputs[0].type !== "checkbox") return inputs[0].value;
  if (Array.isArray(like)) return inputs.filter((input) => input.checked).map((input) => input.value).join("\n");
  if (inputs[0].type === "checkbox") return inputs[0].checked ? "yes" : "no";
  if (inputs[0].type === "radio") return inputs.find((input) => input.checked)?.value;
  return inputs[0].value.trim();
}

// Whether the input says something else than what the job would have anyway; empty asks for just that.
function differs(path) {
  const usual = base()[path];
  if (!inputsOf(path).length) return false;
  const value = valueOf(path, usual);
  if (typeof usual === "number") return value !== "" && Number(value) !== usual;
  return value !== shown(usual);
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

// What the algorithm has no use for is not shown; the server does not read it either.
function showAlgorithm() {
  const name = algorithm.value;
  for (const part of form.querySelectorAll("[data-ignored-by]")) {
    part.hidden = part.dataset.ignoredBy.split(" ").includes(name);
  }
  for (const part of form.querySelectorAll("[data-algorithm]")) part.hidden = part.dataset.algorithm !== name;
  for (const part of form.querySelectorAll("[data-algorithms]")) {
    part.hidden = !part.dataset.algorithms.split(" ").includes(name);
  }
}

// A grader or an environment: the dataset's, none, or one's own.
function showWorld(kind, known) {
  const brought = known[data.value];
  const named = (value) => form.querySelector(`[name="${kind}_from"][value="${value}"]`);
  const choice = named("dataset");
  choice.disabled = !(data.value in known);
  if (choice.disabled && choice.checked) named(kind === "grader" ? "json" : "none").checked = true;
  const from = form.querySelector(`[name="${kind}_from"]:checked`).value;
  const card = form.querySelector(`[data-world="${kind}"]`);
  for (const part of card.querySelectorAll("[data-from]")) part.hidden = part.dataset.from !== from;
  document.getElementById(`dataset-${kind}`).textContent = brought
    ? brought.type === "python" ? brought.source : JSON.stringify(brought, null, 2)
    : `The dataset brings no ${kind}.`;
}

for (const choice of form.querySelectorAll("[data-example]")) {
  choice.addEventListener("change", () => {
    const kind = choice.dataset.example;
    if (!choice.value) return;
    form.elements[`${kind}_json`].value = examples[kind][choice.value];
    choice.value = "";
    checkSoon();
  });
}

// What inputs that are left empty will have.
function showUsual(usual) {
  for (const [path, said] of Object.entries(usual)) {
    for (const input of inputsOf(path)) {
      const empty = input.querySelector('option[value=""]');
      if (empty) empty.textContent = said ? `as usual: ${said}` : "as usual";
      else if (input.inputMode === "decimal") input.placeholder = said;
    }
  }
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
  const { errors, curl, sums, usual } = await answer.json();
  document.getElementById("curl").textContent = curl;
  showUsual(usual);
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

const SUITS = ["rl.algorithm", TUNING, "training_file", "start_from", "grader_from", "environment_from"];

form.addEventListener("input", (event) => {
  const { name } = event.target;
  if (name.startsWith("rl.")) {
    touched.add(name);
    mark(name);
  }
  if (name.endsWith(".type")) showVariant();
  if (SUITS.includes(name)) suit();
  checkSoon();
});

// ---------------------------------------------------------------- upload

const upload = document.getElementById("upload");
const progress = document.getElementById("upload-progress");
const complaint = document.getElementById("upload-error");
const taken = document.getElementById("upload-done");
const purpose = document.getElementById("upload-purpose");

purpose.addEventListener("change", () => {
  for (const part of form.querySelectorAll("[data-for-purpose]")) part.hidden = part.dataset.forPurpose !== purpose.value;
});

upload.addEventListener("change", () => {
  const [file] = upload.files;
  if (!file) return;
  const body = new FormData();
  body.append("purpose", purpose.value);
  body.append("file", file);
  const request = new XMLHttpRequest();
  request.open("POST", form.dataset.upload);
  request.setRequestHeader("X-CSRFToken", form.elements.csrfmiddlewaretoken.value);
  request.responseType = "json";
  request.upload.onprogress = (event) => (progress.value = event.total ? event.loaded / event.total : 0);
  request.onload = () => uploaded(request);
  request.onerror = () => done("The upload did not get through. Try again.");
  complaint.textContent = taken.textContent = "";
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
  const { id, filename, rows, purpose: kept } = request.response;
  if (kept !== "fine-tune") {
    done("");
    taken.textContent = `Taken in: tools search it as ${id}.`;
    return;
  }
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
