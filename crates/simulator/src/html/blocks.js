for (const map of document.querySelectorAll(".blocks")) {
  const { blocks, per_square, frames } = JSON.parse(map.querySelector("script").textContent);
  const canvas = map.querySelector("canvas"), context = canvas.getContext("2d");
  const range = map.querySelector("input"), output = map.querySelector("output"), button = map.querySelector("button");
  const counts = map.querySelectorAll(".legend b");
  const n = Math.ceil(blocks / per_square);
  let columns = 1, pitch = 1, codes = [], timer = null;
  range.max = frames.length - 1;

  // Squares of the moment, from runs of equal ones.
  function unpack(runs) {
    const codes = new Array(n).fill(0);
    for (let at = 0, i = 0; i < runs.length; i += 2) {
      codes.fill(runs[i + 1], at, at + runs[i]);
      at += runs[i];
    }
    return codes;
  }
  function draw() {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    const plain = [color("--free"), color("--cached"), color("--c4")];
    const held = (id) => `hsl(${(id * 137.508) % 360} ${color("--held-s")} ${color("--held-l")})`;
    const [seconds, runs] = frames[range.value];
    codes = unpack(runs);
    // As square as fits: 8 to 22 pixels each.
    const width = map.clientWidth, scale = window.devicePixelRatio || 1;
    pitch = Math.max(8, Math.min(22, Math.sqrt((width * Math.min(width / 2.6, 420)) / n)));
    columns = Math.max(1, Math.floor(width / pitch));
    pitch = width / columns;
    const height = Math.ceil(n / columns) * pitch;
    canvas.width = width * scale;
    canvas.height = height * scale;
    canvas.style.height = height + "px";
    context.setTransform(scale, 0, 0, scale, 0, 0);
    const gap = pitch > 12 ? 2 : 1, totals = [0, 0, 0, 0];
    codes.forEach((code, i) => {
      totals[Math.min(code, 3)] += 1;
      context.fillStyle = code < 3 ? plain[code] : held(code - 3);
      context.beginPath();
      context.roundRect((i % columns) * pitch, Math.floor(i / columns) * pitch, pitch - gap, pitch - gap, pitch / 6);
      context.fill();
    });
    totals.forEach((total, i) => { counts[i].textContent = ((100 * total) / n).toFixed(0) + "%"; });
    const whole = Math.round(seconds);
    output.textContent = seconds < 120 ? seconds.toFixed(2) + " s" : `${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")} min`;
  }
  canvas.addEventListener("pointermove", (event) => {
    const i = Math.floor(event.offsetY / pitch) * columns + Math.floor(event.offsetX / pitch);
    const code = codes[i];
    if (code === undefined) return;
    const whose = ["free", "cached", "shared"][code] ?? "request " + (code - 3);
    output.textContent = `block ${i * per_square}: ${whose}`;
  });
  canvas.addEventListener("pointerleave", draw);
  range.addEventListener("input", draw);
  button.addEventListener("click", () => {
    if (timer !== null) {
      clearInterval(timer);
      timer = null;
      button.textContent = "▶";
      return;
    }
    if (range.value === range.max) range.value = 0;
    button.textContent = "❚❚";
    timer = setInterval(() => {
      range.value = Number(range.value) + 1;
      draw();
      if (range.value === range.max) button.click();
    }, 90);
  });
  window.addEventListener("resize", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  range.value = Math.floor(frames.length / 2);
  draw();
}
