// Numbers, times and ticks as they are shown.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import { bytes, clock, time, trim } from '../src/lib/format.js';
import { STEPS, stepOf, tick } from '../src/lib/ticks.js';

const SECOND = 1e9;
const MINUTE = 60 * SECOND;
const HOUR = 60 * MINUTE;

test('a time has the unit of what is shown, which is rounded', () => {
  const shown = [
    [0, '0 ns'], [7.4, '7 ns'], [999.4, '999 ns'], [999.6, '1.00 µs'], [1234, '1.23 µs'], [999_999, '1.00 ms'], [12.345e6, '12.3 ms'],
    [999.9996e6, '1.00 s'], [59.94 * SECOND, '59.9 s'], [59.96 * SECOND, '1.00 min'], [90 * SECOND, '1.50 min'],
    [59.99 * MINUTE, '1.00 h'], [25 * HOUR, '25.0 h'], [-2e6, '-2.00 ms'],
  ];
  for (const [ns, text] of shown) assert.equal(time(ns), text, `${ns}`);
  assert.equal(time(1.5e6, 2), '1.5 ms');
  assert.deepEqual([trim(9.999), trim(0.5), trim(1234.5), trim(0)], ['10.0', '0.500', '1235', '0.00']);
});

test('there are no parts of a byte', () => {
  const shown = [[0, '0 B'], [5, '5 B'], [1023, '1023 B'], [1024, '1.00 KiB'], [65536, '64.0 KiB'], [1023.9 * 1024, '1.00 MiB'], [3 << 20, '3.00 MiB'], [2 ** 41, '2.00 TiB'], [2 ** 51, '2048 TiB']];
  for (const [n, text] of shown) assert.equal(bytes(n), text, `${n}`);
});

test('a clock counts minutes and hours from 60 on', () => {
  const shown = [[0, '0.00 s'], [12.4 * SECOND, '12.40 s'], [59.994 * SECOND, '59.99 s'], [59.996 * SECOND, '1:00.00'], [62.4 * SECOND, '1:02.40'], [HOUR + 2.4 * SECOND, '1:00:02.40'], [25 * HOUR + 61 * SECOND, '25:01:01.00']];
  for (const [ns, text] of shown) assert.equal(clock(ns), text, `${ns}`);
  assert.deepEqual([clock(62.4 * SECOND, 0), clock(62.44 * SECOND, 1)], ['1:02', '1:02.4']);
});

test('ticks are at round moments, and no two of them have one label', () => {
  STEPS.slice(1).forEach((step, i) => assert.ok(step > STEPS[i], `${step}`));
  assert.deepEqual([stepOf(0.3 * SECOND), stepOf(7 * SECOND), stepOf(31 * SECOND), stepOf(500 * SECOND), stepOf(45 * MINUTE)], [0.5 * SECOND, 10 * SECOND, MINUTE, 10 * MINUTE, HOUR]);
  assert.deepEqual([tick(1.5 * SECOND, 0.5 * SECOND), tick(80 * SECOND, 20 * SECOND), tick(30 * MINUTE, 10 * MINUTE), tick(6 * HOUR, 6 * HOUR)], ['1.5 s', '1:20', '30 min', '6 h']);
  for (const step of STEPS) {
    const labels = Array.from({ length: 8 }, (_, i) => tick(i * step, step));
    assert.equal(new Set(labels).size, 8, labels.join());
  }
});
