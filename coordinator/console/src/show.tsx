// How values are shown, and what pages share.

import { useEffect, useState } from "preact/hooks";
import type { ComponentChildren } from "preact";

export const count = (number: number) => number.toLocaleString("en");

export function bytes(number: number): string {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (number >= 1024 && unit < units.length - 1) {
    number /= 1024;
    unit += 1;
  }
  return `${number.toFixed(unit === 0 ? 0 : 1)} ${units[unit]}`;
}

export function seconds(number: number): string {
  if (number < 10) return `${number.toFixed(1)} s`;
  if (number < 120) return `${Math.round(number)} s`;
  if (number < 7200) return `${Math.round(number / 60)} min`;
  return number < 172800 ? `${Math.round(number / 3600)} h` : `${Math.round(number / 86400)} d`;
}

export const ago = (unixMs: number) => seconds(Math.max(0, Date.now() - unixMs) / 1000);

/// A part of a whole. Only the whole is 100 %, and only nothing is 0 %.
export function share(part: number, whole: number): string {
  if (whole <= 0) return "";
  const percent = (100 * part) / whole;
  const shown = part > 0 && percent < 0.05 ? 0.1 : part < whole && percent >= 99.95 ? 99.9 : percent;
  return `${shown.toFixed(1)} %`;
}

/// Asks now and at intervals. Returns the last answer and the last error; neither, at first, when `of` changes.
export function useEvery<T>(milliseconds: number, ask: () => Promise<T>, of: unknown[] = []) {
  const [state, setState] = useState<{ value?: T; error?: string }>({});
  useEffect(() => {
    let over = false;
    let timer = 0;
    setState({});
    const run = async () => {
      try {
        const value = await ask();
        if (!over) setState({ value });
      } catch (error) {
        if (!over) setState((before) => ({ ...before, error: (error as Error).message }));
      }
      if (!over) timer = window.setTimeout(run, milliseconds);
    };
    void run();
    return () => {
      over = true;
      window.clearTimeout(timer);
    };
  }, of);
  return state;
}

/// How many of many things to draw now: more with each frame, so that no frame takes long.
export function useMore(all: number): number {
  const [shown, setShown] = useState(A_FRAME);
  useEffect(() => {
    if (shown >= all) return;
    const frame = requestAnimationFrame(() => setShown(shown + A_FRAME));
    return () => cancelAnimationFrame(frame);
  }, [shown, all]);
  return shown;
}

/// Tiles or rows.
const A_FRAME = 32;

export const Trouble = ({ text }: { text?: string | null }) => (text ? <p class="trouble" role="alert">{text}</p> : null);

export const Bar = ({ part, whole, label }: { part: number; whole: number; label: string }) => (
  <label class="bar">
    {label}
    <meter min={0} max={whole || 1} value={part} />
    <span>{share(part, whole)}</span>
  </label>
);

/// A head that begins with `#` stands over numbers.
export const Table = ({ heads, children, name }: { heads: string[]; children: ComponentChildren; name: string }) => (
  <div class="scroll">
    <table aria-label={name}>
      <thead>
        <tr>
          {heads.map((head) => (
            <th scope="col" class={head.startsWith("#") ? "number" : ""}>
              {head.replace(/^#/, "")}
            </th>
          ))}
        </tr>
      </thead>
      <tbody>{children}</tbody>
    </table>
  </div>
);
