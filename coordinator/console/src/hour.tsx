// The last hour, as the coordinator remembers it: a small line for each number.

import { hour, type Moment } from "./api";
import { Trouble, bytes, count, seconds, share, useEvery } from "./show";

/// Tokens and evictions are counted since the moment before.
const LINES: { name: string; of: (moment: Moment, elapsed: number) => number | null; most?: number; shown: (value: number) => string }[] = [
  { name: "tokens hit", of: (one) => (one.tokens_asked > 0 ? one.tokens_hit / one.tokens_asked : null), most: 1, shown: (value) => share(value, 1) },
  { name: "tokens asked", of: (one, elapsed) => one.tokens_asked / elapsed, shown: (value) => `${count(Math.round(value))} a second` },
  { name: "memory in use", of: (one) => one.used_bytes, shown: bytes },
  { name: "evictions", of: (one, elapsed) => one.evictions / elapsed, shown: (value) => `${count(Math.round(value))} a second` },
];

export function Hour() {
  const { value, error } = useEvery(10000, hour);
  if (!value || value.length < 3) return <Trouble text={error} />;
  return (
    <div class="lines" aria-label="The last hour" role="group">
      {LINES.map((line) => (
        <Line key={line.name} moments={value} {...line} />
      ))}
    </div>
  );
}

function Line({ name, of, most, shown, moments }: (typeof LINES)[0] & { moments: Moment[] }) {
  const points = moments.slice(1).flatMap((moment, at) => {
    const value = of(moment, Math.max(1, (moment.unix_ms - moments[at]!.unix_ms) / 1000));
    return value === null ? [] : [{ at: moment.unix_ms, value }];
  });
  const [first, last] = [points[0], points[points.length - 1]];
  if (!first || !last) return null;
  const top = most ?? Math.max(...points.map((point) => point.value), 1e-9);
  const x = (at: number) => (300 * (at - first.at)) / Math.max(1, last.at - first.at);
  const line = points.map((point) => `${x(point.at).toFixed(1)},${(58 - (56 * point.value) / top).toFixed(1)}`).join(" ");
  return (
    <figure>
      <svg viewBox="0 0 300 60" role="img" aria-label={`${name} over ${seconds((last.at - first.at) / 1000)}`} preserveAspectRatio="none">
        <polyline points={line} />
      </svg>
      <figcaption>
        {name}: {shown(last.value)} now, {shown(Math.max(...points.map((point) => point.value)))} at most in {seconds((last.at - first.at) / 1000)}
      </figcaption>
    </figure>
  );
}
