/** A Svelte action: gives a canvas the resolution of the device, and calls `draw(context, width, height)` whenever its
 *  size changes or `update` is called. Sizes are in CSS pixels. */
export function canvas(node, draw) {
  let current = draw;
  const paint = () => {
    const { width, height } = node.getBoundingClientRect();
    if (width === 0 || height === 0) return;
    const ratio = Math.min(3, devicePixelRatio || 1);
    const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (node.width !== w || node.height !== h) [node.width, node.height] = [w, h];
    const context = node.getContext('2d');
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    current(context, width, height, ratio);
  };
  const observer = new ResizeObserver(paint);
  observer.observe(node);
  return {
    update(next) {
      current = next;
      paint();
    },
    destroy: () => observer.disconnect(),
  };
}
