const pad = (n, width) => String(Math.floor(n)).padStart(width || 2, '0');
function clock(seconds, step) {
  if (!seconds) return '';
  const at = new Date(seconds * 1000), fine = step < 1 ? '.' + pad(at.getMilliseconds(), 3) : '';
  return pad(at.getHours()) + ':' + pad(at.getMinutes()) + ':' + pad(at.getSeconds()) + fine;
}
function moment(seconds) {
  const at = new Date(seconds * 1000);
  return at.getFullYear() + '-' + pad(at.getMonth() + 1) + '-' + pad(at.getDate()) + ' ' + clock(seconds, 1);
}
const long = s => s < 120 ? (s < 10 ? s.toFixed(2) : s.toFixed(1)) + ' s' : s < 7200 ? (s / 60).toFixed(1) + ' min' : (s / 3600).toFixed(1) + ' h';
const speed = call => call.bytes && call.seconds ? scaled(call.bytes / call.seconds, 1000, [' B/s', ' KB/s', ' MB/s', ' GB/s', ' TB/s']) : '';
const BAD = ['failed', 'raised', 'unconfirmed'];

function cards() {
  const box = add(main, 'div', null, {class: 'cards'});
  const card = (what, value, more) => {
    const made = add(box, 'div');
    add(made, 'span', what);
    add(made, 'b', value);
    if (more) add(made, 'small', more);
  };
  card('ranks that recorded', data.ranks.toLocaleString('en') + (data.world > data.ranks ? ' of ' + data.world.toLocaleString('en') : ''));
  if (data.ranks) card('recorded', long(data.end - data.begin), 'from ' + moment(data.begin));
  const save = data.last_save;
  if (save) card('last ' + save.title, long(save.seconds), [size(save.bytes), speed(save)].filter(Boolean).join(', '));
  card('calls that failed', data.calls.filter(call => BAD.includes(call.outcome)).length);
  card('waits told of', data.waits.length);
  card('roll calls', data.roll_calls.length + data.more_roll_calls);
  if (data.lost) card('events lost', data.lost);
  if (data.skipped) card('lines that are no event', data.skipped);
}

// -- the roll call: stacks as a tree, in which ranks part where their code does; the fewest first ---------------

function rollCalls() {
  const [newest, ...older] = data.roll_calls;
  if (!newest) return;
  add(main, 'h2', 'Roll call of ' + (newest.at ? moment(newest.at) : newest.name));
  add(main, 'p', newest.says + '.', {class: 'says'});
  if (newest.todo) add(main, 'p', newest.todo);
  if (newest.tree) tree(newest);
  if (older.length) {
    add(main, 'h2', 'Roll calls before');
    table([['at', ''], ['answers', 'n'], ['result', 'w']], older.map(one => [one.at ? moment(one.at) : one.name, one.answers, one.says]), 20);
    if (data.more_roll_calls) add(main, 'p', data.more_roll_calls + ' older ones are left out.', {class: 'dim'});
  }
}

function tree(call) {
  add(main, 'p', 'Stacks of ' + call.answers + ' ranks, the outermost call first. They part where the code of ranks does; the fewest ranks come first. ' +
    'A column of a strip is ' + (call.width > 1 ? call.width + ' ranks.' : 'a rank.'), {class: 'dim'});
  const box = add(main, 'div', null, {class: 'box tree'}), made = [];
  box.style.padding = '.4rem .8rem .6rem 0';
  for (const [parent, lines, ranks, count, does, strip, isGuilty] of call.tree) {
    const block = add(made[parent] || box, 'div', null, {class: isGuilty ? 'block guilty' : 'block'});
    const head = add(block, 'div', null, {class: 'head'});
    paint(add(head, 'div', null, {class: 'strip', role: 'img', 'aria-label': ranks}), strip);
    add(head, 'b', ranks);
    if (count > 1) add(head, 'small', count + ' ranks');
    add(block, 'pre', lines.join('\n'));
    if (does) add(block, 'div', does, {class: isGuilty ? 'warn' : 'dim'});
    made.push(block);
  }
  if (call.unseen.length) {
    add(main, 'p');
    table([['no stack of', ''], ['known of it', 'w']], call.unseen, 20);
  }
}

function paint(area, strip) {
  const canvas = add(area, 'canvas', null, {width: strip.length, height: 1}), context = canvas.getContext('2d');
  strip.forEach((share, i) => {
    if (share) { context.fillStyle = `rgba(74,134,240,${.25 + .75 * share})`; context.fillRect(i, 0, 1, 1); }
  });
}

// -- the timeline: a row for each rank, or for many that are alike ------------------------------------------------

const KINDS = {
  begin: ['#8a94a3', 'begins: reads the state, meets the others'], move: ['#3b7be0', 'moves bytes, or acts'],
  wait: ['#e0a23b', 'waits for others'], commit: ['#3f9d5a', 'commits'], fail: ['#d13c3c', 'failed'],
};
const HUES = [265, 180, 320, 95, 225, 10, 140];
let zoom = () => {};

function timeline(found) {
  add(main, 'h2', 'Timeline');
  add(main, 'p', 'Drag to look closer; a double click shows all. Clocks are those of the hosts.' + (found.cut ? ' ' + found.cut : ''), {class: 'dim'});
  const phases = found.names.filter(name => name[0] === 'phase').map(name => name[1]);
  const colour = ([kind, name]) => kind === 'phase' ? `hsl(${HUES[phases.indexOf(name) % HUES.length]} 45% 60% / .38)` : KINDS[kind][0];
  const colours = found.names.map(colour), kinds = found.names.map(name => name[0]);
  const legend = add(main, 'div', null, {class: 'legend'});
  const swatch = (fill, name) => { const item = add(legend, 'span'); add(item, 'i').style.background = fill; item.append(name); };
  for (const [kind, [fill, name]] of Object.entries(KINDS)) if (kinds.includes(kind)) swatch(fill, name);
  phases.slice(0, 12).forEach(name => swatch(colour(['phase', name]), 'phase ' + name));
  const read = add(main, 'div', 'Point at a row to read it.', {class: 'read', style: 'height:3em;overflow:hidden', 'aria-live': 'polite'});
  const box = add(main, 'div', null, {class: 'time'}), labels = add(box, 'div'), canvas = add(box, 'canvas', null, {role: 'img', 'aria-label': 'What each rank did, over time'});
  const AXIS = 22, GAP = 5, length = Math.max((data.end - data.begin) * 1000, 1);
  const lanes = [];
  let height = 6;
  add(labels, 'div').style.height = '6px';
  for (const row of found.rows) {
    const each = row.members.length > 1 ? Math.max(2, Math.min(14, Math.floor(240 / row.members.length))) : 18, begun = height;
    for (const member of row.members) { lanes.push({member, row, y: height, h: each}); height += each; }
    const label = add(labels, 'div', row.count > 1 ? row.count.toLocaleString('en') + ' ranks' : row.label, {class: 'label', title: row.label + (row.note ? ': ' + row.note : '')});
    label.style.height = label.style.lineHeight = (height - begun + GAP) + 'px';
    if (row.note && row.count === 1) label.classList.add('warn');
    height += GAP;
  }
  canvas.style.height = (height + AXIS) + 'px';
  let from = 0, to = length, drag = null;
  const context = canvas.getContext('2d');
  const width = () => canvas.clientWidth;
  const x = t => (t - from) / (to - from) * width();
  const draw = () => {
    const ratio = window.devicePixelRatio || 1, style = getComputedStyle(document.body), get = name => style.getPropertyValue(name);
    canvas.width = width() * ratio;
    canvas.height = (height + AXIS) * ratio;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    for (const {member, y, h} of lanes) {
      context.fillStyle = get('--track');
      context.fillRect(0, y, width(), h > 4 ? h - 1 : h);
      for (const under of [true, false]) for (let i = 0; i < member.spans.length; i += 4) {
        const [name, , begin, lasts] = member.spans.slice(i, i + 4);
        if ((kinds[name] === 'phase') !== under || begin > to || begin + lasts < from) continue;
        const left = Math.max(x(begin), 0), right = Math.min(x(begin + lasts), width());
        const inset = !under && h > 8 ? 3 : 0;
        context.fillStyle = colours[name];
        context.fillRect(left, y + inset, Math.max(right - left, kinds[name] === 'fail' ? 3 : under ? .5 : 1), (h > 4 ? h - 1 : h) - 2 * inset);
      }
    }
    context.font = '11px system-ui,sans-serif';
    context.strokeStyle = KINDS.fail[0];
    context.setLineDash([4, 3]);
    for (const call of data.roll_calls) {
      const at = x((call.at - data.begin) * 1000);
      if (at < 0 || at > width()) continue;
      context.beginPath();
      context.moveTo(at, 0);
      context.lineTo(at, height);
      context.stroke();
      context.fillStyle = KINDS.fail[0];
      context.textAlign = at > width() - 60 ? 'right' : 'left';
      context.fillText('roll call', at + (at > width() - 60 ? -4 : 4), height + 1);
    }
    context.setLineDash([]);
    context.fillStyle = get('--dim');
    context.textAlign = 'left';
    const steps = [.001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 20, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400, 604800];
    const step = steps.find(one => (to - from) / 1000 / one <= Math.max(width() / 110, 2)) || 31e6;
    const zone = new Date(data.begin * 1000).getTimezoneOffset() * 60;
    for (let at = Math.ceil((data.begin + from / 1000 - zone) / step) * step + zone; at <= data.begin + to / 1000; at += step) {
      const place = x((at - data.begin) * 1000);
      context.fillRect(place, height, 1, 5);
      if (place < width() - 50) context.fillText(step >= 86400 ? moment(at).slice(0, 10) : clock(at, step), place + 3, height + 16);
    }
    if (drag) {
      context.fillStyle = 'rgba(74,134,240,.18)';
      context.fillRect(Math.min(drag[0], drag[1]), 0, Math.abs(drag[1] - drag[0]), height);
    }
  };
  zoom = (begin, end) => {
    const room = Math.max((end - begin) * 60, 5);
    from = Math.max((begin - data.begin) * 1000 - room, 0);
    to = Math.min((end - data.begin) * 1000 + room, length);
    draw();
    box.scrollIntoView({block: 'nearest'});
  };
  const place = event => event.clientX - canvas.getBoundingClientRect().left;
  canvas.onpointerdown = event => { drag = [place(event), place(event)]; canvas.setPointerCapture(event.pointerId); };
  canvas.onpointermove = event => {
    if (drag) { drag[1] = place(event); draw(); }
    say(event);
  };
  canvas.onpointerup = () => {
    const [a, b] = (drag || [0, 0]).map(v => from + v / width() * (to - from));
    if (Math.abs(drag[1] - drag[0]) > 4) [from, to] = [Math.max(Math.min(a, b), 0), Math.min(Math.max(a, b), length)];
    drag = null;
    draw();
  };
  canvas.ondblclick = () => { [from, to] = [0, length]; draw(); };
  const say = event => {
    const bounds = canvas.getBoundingClientRect(), y = event.clientY - bounds.top, t = from + place(event) / width() * (to - from);
    const lane = lanes.find(one => y >= one.y && y < one.y + one.h);
    if (!lane) return;
    const {member, row} = lane, slack = (to - from) / width(), parts = [];
    for (let i = 0; i < member.spans.length; i += 4) {
      const [name, call, begin, lasts] = member.spans.slice(i, i + 4);
      if (t < begin - slack || t > begin + lasts + slack) continue;
      const [kind, text] = found.names[name];
      parts.push((kind === 'phase' ? 'phase ' + text : text + (call >= 0 ? ' (' + data.calls[call].title + ')' : '')) + ', ' + long(lasts / 1000));
    }
    read.textContent = `rank ${member.rank}` + (member.who ? ` (${member.who})` : '') + ` at ${clock(data.begin + t / 1000, .1)}: ` +
      (parts.slice(0, 6).join('; ') || 'in no call of Holdfast') + (row.note && row.count === 1 ? '. Unlike the others: ' + row.note : '');
  };
  addEventListener('resize', draw);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', draw);
  draw();
  const bands = found.rows.filter(row => row.members.length < row.count);
  for (const row of bands) add(main, 'p', `Of ${row.count} ranks that are ${row.note}, ${row.members.length} are drawn: ${row.label}.`, {class: 'dim'});
  const unlike = found.rows.filter(row => row.note && row.count === 1);
  if (unlike.length) {
    add(main, 'h2', 'Unlike the others');
    table([['rank', ''], ['why', 'w']], unlike.map(row => [row.label, row.note]), 40);
  }
}

function calls() {
  if (!data.calls.length) return;
  add(main, 'h2', 'Saves, loads and other calls');
  const shown = [...data.calls].reverse();
  const head = [['call', ''], ['began', ''], ['took', 'n'], ['bytes', 'n'], ['speed', 'n'], ['ranks', 'n'], ['longest work', 'w'], ['ended', 'w']];
  table(head, shown.map(call => [
    call.title, moment(call.begin), long(call.seconds), call.bytes ? size(call.bytes) : '', speed(call), call.ranks, call.longest,
    (call.outcome || 'not yet') + (call.error ? ': ' + call.error : ''),
  ]), 40, at => zoom(shown[at].begin, shown[at].begin + shown[at].seconds));
}

function waits() {
  if (!data.waits.length) return;
  add(main, 'h2', 'Waits that were told of');
  const head = [['since', ''], ['in', ''], ['for', 'w'], ['to', 'w'], ['waited', ''], ['took', 'n'], ['came', '']];
  table(head, [...data.waits].reverse().map(wait => [
    moment(wait.at), wait.title, wait.late, wait.what, wait.waiting, long(wait.seconds), wait.came ? 'yes' : 'not in the log',
  ]), 20, at => { const wait = [...data.waits].reverse()[at]; zoom(wait.at, wait.at + wait.seconds); });
}

function steps() {
  if (!data.steps.length) return;
  add(main, 'h2', 'Committed steps in the folder');
  table([['step', 'n'], ['committed at', ''], ['age', 'n'], ['ranks', 'n']], data.steps, 12);
}

cards();
rollCalls();
if (data.timeline) timeline(data.timeline);
else add(main, 'p', 'No rank has recorded events, so there is no timeline: set HOLDFAST_EVENTS to this folder in the job, which calls holdfast.install().');
calls();
waits();
steps();
