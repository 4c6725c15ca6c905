// What a test asks about a page as it is drawn.
(() => {
  const parts = (text) => text.match(/[\d.]+/g).map(Number);
  const over = (front, back) => back.map((one, at) => front[at] * (front[3] ?? 1) + one * (1 - (front[3] ?? 1)));
  const backOf = (node) => (node ? over(parts(getComputedStyle(node).backgroundColor), backOf(node.parentElement)) : [255, 255, 255]);

  /** The relative luminance of WCAG 2.2. */
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((one) => one / 255).map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };

  /** Texts whose contrast is below 4.5: WCAG 2.2, success criterion 1.4.3. */
  window.faintTexts = () => {
    const found = [];
    for (const node of document.querySelectorAll("body, body *")) {
      const hasText = [...node.childNodes].some((one) => one.nodeType === 3 && one.data.trim()) || node.matches("input, textarea");
      if (!hasText || !node.checkVisibility() || node.matches("option")) continue;
      const back = backOf(node);
      for (const part of [null, "::placeholder"]) {
        const front = over(parts(getComputedStyle(node, part).color), back);
        const [dark, bright] = [luminance(front), luminance(back)].sort((one, other) => one - other);
        const ratio = (bright + 0.05) / (dark + 0.05);
        if (ratio < 4.5) found.push([node.tagName, node.className || node.id, part, ratio.toFixed(2)].join(" "));
      }
    }
    return found;
  };

  /** What can be operated and has no name for a screen reader. */
  window.namelessControls = () =>
    [...document.querySelectorAll("button, input, select, textarea, canvas, [tabindex]")]
      .filter((one) => one.checkVisibility() && one.ariaHidden !== "true")
      .filter((one) => !(one.ariaLabel || one.labels?.length || (one.tagName === "BUTTON" && one.textContent.trim())))
      .map((one) => one.outerHTML.slice(0, 80));

  /** [layer, expert] of each cell of the grid that has another colour than most. */
  window.litCells = (layers, experts) => {
    const canvas = document.getElementById("grid");
    const left = 24 * Math.min(2, devicePixelRatio);
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const cells = [];
    const times = new Map();
    for (let layer = 0; layer < layers; layer += 1)
      for (let expert = 0; expert < experts; expert += 1) {
        const x = Math.round(left + (expert * (canvas.width - left)) / experts);
        const from = 4 * (Math.floor(((layer + 0.4) * canvas.height) / layers) * canvas.width + x);
        const colour = data.slice(from, from + 3).join();
        times.set(colour, (times.get(colour) ?? 0) + 1);
        cells.push([layer, expert, colour]);
      }
    const [[most]] = [...times].sort((one, other) => other[1] - one[1]);
    return cells.filter((one) => one[2] !== most).map(([layer, expert]) => [layer, expert]);
  };
})();
