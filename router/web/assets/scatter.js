// Predicted against measured, as points: on the diagonal the prediction held.

import { Drawing, cleared, h } from "./dom.js";

const LEFT = 58, BOTTOM = 30, TOP = 10, RIGHT = 12, HEIGHT = 260, NEAR = 12;

export class Scatter extends Drawing {
  /** `text(value)` writes a value; `open(point)`: a point was clicked. Points: {id, x: predicted, y: measured}. */
  constructor({ label, text, open }) {
    super();
    Object.assign(this, { label, text, open });
    this.points = [];
  }

  with(points) {
    this.points = points;
    const label = `${this.label}: ${points.length} decisions. The figures above and the tables below say the same.`;
    return h("canvas", { class: "plot", role: "img", "aria-label": label, ref: (canvas) => this.mounted(canvas) });
  }

  listen(canvas) {
    canvas.addEventListener("click", (event) => {
      const point = this.nearest(event.offsetX, event.offsetY);
      if (point) this.open(point);
    });
  }

  /** The largest value of both axes, rounded up to 1, 2 or 5 of a power of ten. */
  largest() {
    const found = this.points.reduce((best, { x, y }) => Math.max(best, x, y), 0);
    if (found <= 0) return 1;
    const power = 10 ** Math.floor(Math.log10(found));
    return power * [1, 2, 5, 10].find((each) => each * power >= found);
  }

  place(point) {
    const width = this.canvas.clientWidth - LEFT - RIGHT, height = HEIGHT - TOP - BOTTOM;
    return [LEFT + (point.x / this.scale) * width, TOP + height - (point.y / this.scale) * height];
  }

  nearest(x, y) {
    let best = null, distance = NEAR;
    for (const point of this.points) {
      const [left, top] = this.place(point), far = Math.hypot(left - x, top - y);
      if (far < distance) [best, distance] = [point, far];
    }
    return best;
  }

  draw() {
    const { canvas } = this;
    if (!canvas?.isConnected) return;
    this.scale = this.largest();
    const { paint, width, font, colour } = cleared(canvas, HEIGHT);
    paint.font = `11px ${font}`;
    this.axes(paint, width, colour("--line"), colour("--muted"));
    paint.fillStyle = colour("--accent");
    paint.globalAlpha = this.points.length > 200 ? 0.4 : 0.65;
    for (const point of this.points) {
      const [x, y] = this.place(point);
      paint.beginPath();
      paint.arc(x, y, 2.5, 0, 7);
      paint.fill();
    }
  }

  axes(paint, width, line, muted) {
    const right = width - RIGHT, bottom = HEIGHT - BOTTOM;
    paint.strokeStyle = line;
    paint.fillStyle = muted;
    paint.lineWidth = 1;
    for (const share of [0, 0.5, 1]) {
      const y = Math.round(bottom - share * (bottom - TOP)) + 0.5, x = Math.round(LEFT + share * (right - LEFT)) + 0.5, text = this.text(share * this.scale);
      paint.beginPath();
      paint.moveTo(LEFT, y);
      paint.lineTo(right, y);
      paint.moveTo(x, TOP);
      paint.lineTo(x, bottom);
      paint.stroke();
      paint.textAlign = "right";
      paint.fillText(text, LEFT - 6, y + 4);
      paint.textAlign = share === 0 ? "left" : share === 1 ? "right" : "center";
      paint.fillText(text, x, bottom + 13);
    }
    paint.textAlign = "center";
    paint.fillText("predicted", (LEFT + right) / 2, HEIGHT - 4);
    paint.textAlign = "left";
    paint.fillText("measured", LEFT + 6, TOP + 12);
    paint.strokeStyle = muted;
    paint.setLineDash([3, 4]);
    paint.beginPath();
    paint.moveTo(LEFT, bottom);
    paint.lineTo(right, TOP);
    paint.stroke();
    paint.setLineDash([]);
  }
}
