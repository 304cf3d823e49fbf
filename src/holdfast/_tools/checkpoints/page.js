// Points [x, y] as a line over an area that begins at 0; the x axis is the number of the step.
function chart(parent, title, points) {
  const figure = add(parent, 'figure');
  add(figure, 'figcaption', title);
  const [width, height, left] = [440, 130, 62], svg = add(figure, 'svg:svg', null, {viewBox: `0 0 ${width} ${height + 20}`, role: 'img', 'aria-label': title});
  const xs = points.map(p => p[0]), low = Math.min(...xs), high = Math.max(...xs), top = Math.max(...points.map(p => p[1]), 1);
  const x = v => left + (width - left - 8) * (high > low ? (v - low) / (high - low) : .5), y = v => 6 + (height - 12) * (1 - v / top);
  for (const v of [0, top / 2, top]) {
    add(svg, 'svg:line', null, {x1: left, x2: width - 8, y1: y(v), y2: y(v), stroke: 'var(--line)'});
    add(svg, 'svg:text', size(v), {x: left - 8, y: y(v) + 4, 'text-anchor': 'end'});
  }
  const line = points.map(p => x(p[0]).toFixed(1) + ',' + y(p[1]).toFixed(1));
  add(svg, 'svg:polygon', null, {points: [`${x(xs[0])},${y(0)}`, ...line, `${x(xs[xs.length - 1])},${y(0)}`].join(' '), fill: 'var(--blue)', opacity: .16});
  add(svg, 'svg:polyline', null, {points: line.join(' '), fill: 'none', stroke: 'var(--blue)', 'stroke-width': 2, 'stroke-linejoin': 'round'});
  if (points.length <= 40) for (const p of points) add(svg, 'svg:circle', null, {cx: x(p[0]), cy: y(p[1]), r: 2.6, fill: 'var(--blue)'});
  add(svg, 'svg:text', 'step ' + low, {x: left, y: height + 14});
  if (high > low) add(svg, 'svg:text', 'step ' + high, {x: width - 8, y: height + 14, 'text-anchor': 'end'});
}

function run(found) {
  add(main, 'h2', 'Steps of the run');
  if (found.rules) add(main, 'p', found.rules);
  const charts = add(main, 'div', null, {class: 'charts'});
  chart(charts, 'Size of each step', found.sizes);
  chart(charts, 'All steps together', found.together);
  add(main, 'p');
  const head = [['step', 'n'], ['state', 'w'], ['size', 'n'], ['committed at', ''], ['age', 'n'], ['kept as', 'w'], ['metrics', 'w']];
  table(head, found.steps.map(s => [s[0], s[1], size(s[2]), ...s.slice(3)]), 100);
  if (found.older) add(main, 'p', found.older + ' older steps are left out.', {class: 'dim'});
}

function checkpoint(found) {
  add(main, 'h2', found.title);
  const cards = add(main, 'div', null, {class: 'cards'});
  for (const [what, value, unit] of found.cards) {
    const card = add(cards, 'div');
    add(card, 'span', what);
    add(card, 'b', unit === 'bytes' ? size(value) : unit === 'count' ? count(value) : value);
  }
  const list = add(main, 'dl');
  for (const [name, value] of found.facts) { add(list, 'dt', name); add(list, 'dd', value); }
  picture(found);
  add(main, 'h2', 'By module and dtype');
  const head = [['module', 'w'], ['dtype', ''], ['tensors', 'n'], ['elements', 'n'], ['size', 'n']];
  table(head, found.totals.map(t => [t[0], t[1], t[2].toLocaleString('en'), count(t[3]), size(t[4])]), 40);
}

// One column for each rank, or for `width` of them; one row for each part of the names' tree.
function picture(found) {
  const {ranks, width, written, nodes} = found, columns = written.length;
  add(main, 'h2', 'Which ranks wrote what');
  add(main, 'p', 'A column is ' + (width > 1 ? width + ' ranks' : 'a rank') + '; the stronger its colour, the more of the row it wrote. ' +
    'Of tensors that several ranks hold, each of them writes a part, or one of them all. The bars are all that was written.');
  const read = add(main, 'div', null, {class: 'read', 'aria-live': 'polite'});
  read.textContent = 'Point at a bar or a strip to read it.';
  const box = add(main, 'div', null, {class: 'box'}), tree = add(box, 'div', null, {class: 'tree', role: 'treegrid', 'aria-label': 'Tensors by name'});
  const who = i => width > 1 ? `ranks ${i * width}–${Math.min((i + 1) * width, ranks) - 1}` : `rank ${i}`;
  const strips = Uint8Array.from(atob(found.strips), c => c.charCodeAt(0));
  const say = (text, area) => {
    const at = event => {
      const place = area.getBoundingClientRect(), i = Math.floor((event.clientX - place.left) / place.width * columns);
      if (i >= 0 && i < columns) read.textContent = text(i);
    };
    area.onmousemove = at;
    area.onclick = at;
  };

  const head = add(tree, 'div', null, {class: 'row head', role: 'row'});
  for (const [name, kind] of [['name', ''], ['dtype, shape', ''], ['elements', 'n'], ['size', 'n']]) add(head, 'span', name, {class: 'dim ' + kind, role: 'columnheader'});
  const last = add(head, 'div', null, {role: 'columnheader'}), top = Math.max(...written, 1), gap = columns <= 64 ? .12 : 0;
  const svg = add(last, 'svg:svg', null, {viewBox: `0 0 ${columns} 100`, preserveAspectRatio: 'none', 'shape-rendering': gap ? 'auto' : 'crispEdges', style: 'height:44px', role: 'img', 'aria-label': 'Bytes written by each rank'});
  written.forEach((bytes, i) => add(svg, 'svg:rect', null, {class: 'bar', x: i, width: gap ? 1 - gap : 1.04, y: 100 - 100 * bytes / top, height: 100 * bytes / top}));
  const axis = add(last, 'div', null, {style: 'display:flex;justify-content:space-between', class: 'dim'});
  const ticks = [...new Set([0, ranks >> 1, ranks - 1])];
  for (const rank of ticks) add(axis, 'small', (rank === 0 ? 'rank ' : '') + rank);
  say(i => `${who(i)} wrote ${size(written[i])}`, svg);

  const children = nodes.map(() => []);
  nodes.forEach((node, i) => { if (i) children[node[0]].push(i); });
  const paint = (area, node) => {
    const canvas = add(area, 'canvas', null, {width: columns, height: 1}), context = canvas.getContext('2d');
    const values = strips.subarray(node[6] * columns, (node[6] + 1) * columns), sum = values.reduce((a, b) => a + b, 0);
    values.forEach((value, i) => {
      if (value) { context.fillStyle = `rgba(74,134,240,${.18 + .82 * value / 255})`; context.fillRect(i, 0, 1, 1); }
    });
    say(i => `${who(i)} wrote ${values[i] ? 'about ' + size(node[5] * values[i] / sum) : 'nothing'} of ${full(node)}`, area);
  };
  const full = node => node === nodes[0] ? 'all' : (node[0] ? full(nodes[node[0]]) + '.' : '') + node[1];
  const line = (i, depth, before) => {
    const node = nodes[i], row = document.createElement('div');
    row.className = i ? 'row' : 'row all';
    row.setAttribute('role', 'row');
    row.setAttribute('aria-level', depth + 1);
    before.after(row);
    const name = add(row, 'div', null, {class: 'name', role: 'gridcell', style: `padding-left:${Math.min(depth, 12) * 1.05}rem`, title: full(node)});
    add(row, 'div', node[2], {class: 'what', role: 'gridcell', title: node[2]});
    add(row, 'div', node[4] ? count(node[4]) : '', {class: 'n', role: 'gridcell'});
    add(row, 'div', size(node[5]), {class: 'n', role: 'gridcell'});
    paint(add(row, 'div', null, {class: gap ? 'strip gaps' : 'strip', style: `--cell:${100 / columns}%`, role: 'gridcell'}), node);
    if (!children[i].length) { add(name, 'span', '', {class: 'mark'}); name.append(node[1]); return row; }
    const button = add(name, 'button', null, {'aria-expanded': 'false'});
    add(button, 'span', '▸', {class: 'mark'});
    button.append(node[1] + ' ');
    add(button, 'small', node[3].toLocaleString('en') + (node[3] > 1 ? ' names' : ' name'));
    const below = row.below = [];
    row.node = i;
    row.toggle = open => {
      if (open === (button.getAttribute('aria-expanded') === 'true')) return;
      button.setAttribute('aria-expanded', open);
      if (!open) { for (const other of below.splice(0)) { if (other.toggle) other.toggle(false); other.remove(); } return; }
      let end = row;
      const next = from => {
        for (const child of children[i].slice(from, from + 300)) below.push(end = line(child, depth + 1, end));
        if (children[i].length <= from + 300) return;
        const more = document.createElement('div');
        more.className = 'row';
        end.after(more);
        below.push(more);
        add(more, 'button', `${children[i].length - from - 300} more`).onclick = () => { below.splice(below.indexOf(more), 1); more.remove(); next(from + 300); };
      };
      next(0);
    };
    button.onclick = () => row.toggle(button.getAttribute('aria-expanded') !== 'true');
    return row;
  };
  // What fits on about two screens is open at the beginning; of a long list, the items stay closed.
  let room = 84;
  const open = row => {
    if (!row.toggle || children[row.node].length > room) return;
    row.toggle(true);
    room -= row.below.length;
    if (row.below.length <= 12) [...row.below].forEach(open);
  };
  open(line(0, 0, head));
  if (found.cut) add(main, 'p', found.cut, {class: 'dim'});
}

if (data.run) run(data.run);
if (data.checkpoint) checkpoint(data.checkpoint);
