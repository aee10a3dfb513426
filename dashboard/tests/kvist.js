// A running `kvist serve`.
import { spawn } from 'node:child_process';

export const program = process.env.KVIST;

/** `kvist serve` with a small cache of the embedded model, on a free port. */
export async function start(...flags) {
  const child = spawn(program, ['serve', ...(flags.includes('--port') ? [] : ['--port', '0']), '--context', '2048', '--max-batch', '8', ...flags], { stdio: ['ignore', 'pipe', 'inherit'] });
  const url = await new Promise((resolve, reject) => {
    let text = '';
    child.on('exit', (code) => reject(new Error(`kvist serve ended with ${code}`)));
    child.stdout.on('data', (data) => {
      text += data;
      const found = /http:\/\/\S+/.exec(text);
      if (found) resolve(`${found[0]}/`);
    });
  });
  const stop = () =>
    new Promise((resolve) => {
      if (child.exitCode !== null || child.signalCode !== null) return resolve();
      child.removeAllListeners('exit');
      child.on('exit', resolve);
      child.kill('SIGTERM');
    });
  return { child, url, stop };
}
