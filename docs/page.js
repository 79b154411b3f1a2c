// Marks what belongs together, and opens choices in place. Without this script all links still lead to the right lines.
for (const sides of document.querySelectorAll(".sides")) {
  const rows = [...sides.querySelectorAll(".row[data-l]")];
  const left = row => !!row.closest(".paper");
  const labels = row => row.dataset.l.split(" ");
  let pinned = null, by_key = false;  // by_key: the arrow keys walk, and a pointer that rests does not mark

  const partners = row => rows.filter(other => left(other) !== left(row) && labels(other).some(l => labels(row).includes(l)));
  function mark(row) {
    const on = row ? [...partners(row), ...rows.filter(r => left(r) === left(row) && (r === row || left(r) && r.dataset.l === row.dataset.l))] : [];
    for (const other of rows) other.classList.toggle("on", on.includes(other));
  }
  function pin(row) {
    pinned = pinned === row ? null : row;
    for (const other of rows) other.classList.toggle("pin", other === pinned);
    mark(row);
    const there = pinned && partners(row)[0];
    if (there) {
      const box = there.getBoundingClientRect();
      if (box.top < 0 || box.bottom > innerHeight) there.scrollIntoView({block: "center"});
    }
  }
  const row_of = event => event.target.closest && event.target.closest(".row[data-l]");
  sides.addEventListener("mousemove", event => { if (event.movementX || event.movementY) by_key = false; });
  sides.addEventListener("mouseover", event => by_key || mark(row_of(event) || pinned));
  sides.addEventListener("mouseleave", () => by_key || mark(pinned));
  sides.addEventListener("focusin", event => row_of(event) && event.target.matches(":focus-visible") && mark(row_of(event)));
  sides.addEventListener("click", event => {
    if (event.target.closest(".note") || event.target.closest("h3") || String(getSelection())) return;
    const choice = event.target.closest("a.d"), row = row_of(event);
    if (choice) { event.preventDefault(); open_choice(choice); }
    else if (row) {
      event.preventDefault();
      const line = rows.find(other => left(other) && labels(row).includes(other.dataset.l));
      if (line) line.querySelector("a.n").focus({preventScroll: true, focusVisible: false});  // the keys go on from here
      pin(row);
    }
  });
  sides.addEventListener("keydown", event => {
    const step = {ArrowDown: 1, ArrowUp: -1}[event.key];
    if (event.key === "Escape") {
      pinned = null;
      mark(null);
      rows.forEach(row => row.classList.remove("pin"));
      sides.querySelectorAll(".note").forEach(close_choice);
    } else if (step && event.target.matches(".paper .n")) {
      const numbers = [...sides.querySelectorAll(".paper a.n")], next = numbers[numbers.indexOf(event.target) + step];
      event.preventDefault();
      if (next) {
        by_key = true;
        pinned = null;
        rows.forEach(row => row.classList.remove("pin"));
        next.focus({preventScroll: innerWidth > 800});
        next.scrollIntoView({block: "nearest"});
        mark(next.closest(".row"));
        const there = partners(next.closest(".row"))[0];
        if (there) there.scrollIntoView({block: "center"});
      }
    }
  });
}

function open_choice(link) {
  const row = link.closest(".row"), shown = row.querySelector(":scope > .note"), id = link.hash.slice(1);
  if (shown) close_choice(shown);
  if (shown && shown.dataset.of === id) return;
  const note = document.createElement("aside"), close = document.createElement("button");
  note.className = "note";
  note.dataset.of = id;
  note.innerHTML = document.getElementById(id).innerHTML.replace(/^<summary>(.*?)<\/summary>/s, "<p>$1</p>");
  note.querySelectorAll("[id]").forEach(part => part.removeAttribute("id"));
  close.textContent = "close";
  close.addEventListener("click", () => { close_choice(note); link.focus(); });
  note.prepend(close);
  row.append(note);
  note.scrollIntoView({block: "nearest"});
  link.setAttribute("aria-expanded", "true");
}
function close_choice(note) {
  note.closest(".row").querySelectorAll("a.d").forEach(link => link.removeAttribute("aria-expanded"));
  note.remove();
}

// A link to a choice or a section that is folded opens it.
function unfold() {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let part = target; part; part = part.parentElement) if (part.tagName === "DETAILS") part.open = true;
  if (target && target.closest("details")) target.scrollIntoView();
}
addEventListener("hashchange", unfold);
unfold();

// What is wider than the window says that it scrolls.
const wide = new ResizeObserver(changes => {
  for (const {target} of changes) target.classList.toggle("scrolls", target.scrollWidth > target.clientWidth + 1);
});
document.querySelectorAll(".wide, pre, figure, p:has(> img)").forEach(box => wide.observe(box));

// SuPerFed's slider: the mixture of two orthogonal models, and the recorded accuracy at this lambda.
const slider = document.getElementById("slider");
if (slider) {
  const curve = JSON.parse(slider.querySelector("script").textContent), input = slider.querySelector("input");
  const part = id => slider.querySelector("#" + id), place = (circle, x, y) => { circle.setAttribute("cx", x); circle.setAttribute("cy", y); };
  const height = accuracy => 190 * (1 - (accuracy - .4) / .6), short = x => String(x).replace(/^0\./, ".");
  part("curve").setAttribute("points", curve.map((accuracy, i) => `${30 * i},${height(accuracy)}`).join(" "));
  function show() {
    const i = Number(input.value), x = 19 * (10 - i), y = 190 - 19 * i;
    place(part("mix"), x, y);
    part("mix-guide").setAttribute("d", `M${x} 190 V${y} H0`);
    part("mix-text").textContent = `W = ${short((10 - i) / 10)} w\u1da0 + ${short(i / 10)} w\u02e1`;
    place(part("point"), 30 * i, height(curve[i]));
    part("point-text").textContent = `accuracy ${short(curve[i].toFixed(3))} at λ = ${short(i / 10)}`;
  }
  input.addEventListener("input", show);
  show();
}
