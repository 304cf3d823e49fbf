'use strict';
// What all pages share. Texts are of checkpoints and logs, which nobody has checked: they become text nodes only, never markup.
const data = JSON.parse(document.getElementById('data').textContent);
const main = document.querySelector('main');
const SVG = 'http://www.w3.org/2000/svg';

function add(parent, tag, text, attributes) {
  const made = tag.startsWith('svg:') ? document.createElementNS(SVG, tag.slice(4)) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
  if (text !== undefined && text !== null) made.textContent = text;
  parent.append(made);
  return made;
}

function scaled(value, base, units) {
  let at = 0;
  while (value >= base && at < units.length - 1) { value /= base; at++; }
  return (at && value < 100 ? value.toFixed(value < 10 ? 2 : 1) : Math.round(value)) + units[at];
}
const size = bytes => scaled(bytes, 1024, [' B', ' KiB', ' MiB', ' GiB', ' TiB']);
const count = number => scaled(number, 1000, ['', ' K', ' M', ' B', ' T']);

function heading() {
  add(main, 'h1', data.title);
  add(main, 'div', data.path, {class: 'path'});
  add(main, 'small', 'Seen at ' + data.made + '.');
}

// pick: called with the number of a row whose first cell, a button then, is clicked.
function table(head, rows, first, pick) {
  const box = add(main, 'div', null, {class: 'box'}), made = add(box, 'table');
  const line = add(add(made, 'thead'), 'tr'), body = add(made, 'tbody');
  for (const [name, kind] of head) add(line, 'th', name, {class: kind});
  let shown = 0;
  const more = n => {
    rows.slice(shown, shown + n).forEach((row, k) => {
      const cells = add(body, 'tr'), at = shown + k;
      row.forEach((cell, i) => add(cells, 'td', pick && !i ? null : cell, {class: head[i][1]}));
      if (pick) add(cells.firstChild, 'button', row[0], {class: 'link'}).onclick = () => pick(at);
    });
    shown += n;
  };
  more(first);
  if (rows.length > first) {
    const button = add(add(main, 'p'), 'button', 'Show ' + Math.min(1000, rows.length - first) + ' more of ' + rows.length);
    button.onclick = () => { more(1000); button.parentNode.remove(); };
  }
}

heading();

