// Links: bytes, round trips and loss between nodes, as a heat map.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { nodes, type Link, type Said } from "./api";
import { Table, Trouble, bytes, count, useEvery } from "./show";

const milliseconds = (value: number) => `${(1000 * value).toFixed(value < 0.01 ? 2 : 0)} ms`;

const MEASURES: Record<string, { of: (link: Link) => number | null; shown: (value: number) => string; isLogarithmic: boolean }> = {
  "bytes sent": { of: (link) => link.sent_bytes, shown: bytes, isLogarithmic: true },
  "round trip": { of: (link) => link.rtt_seconds, shown: milliseconds, isLogarithmic: true },
  "packets lost": {
    of: (link) => (link.sent_packets > 0 ? link.lost_packets / link.sent_packets : null),
    shown: (value) => `${(100 * value).toFixed(2)} %`,
    isLogarithmic: false,
  },
};

/// With more nodes than this, the map has dots instead of rows and columns, and a list of the most loaded links.
const MOST_NODES = 32;

const MOST_LISTED = 50;

/// The steps of the style, from the coldest to the hottest.
const HEATS = [0, 8, 18, 28, 40, 55];

type Row = { from: string; to: string; link: Link; value: number };

function rowsOf(said: Said<Link[]>[], measure: (typeof MEASURES)[string]): { members: string[]; rows: Row[] } {
  const members = said.map((one) => one.node);
  const known = new Set(members);
  const rows = said.flatMap((one) =>
    (one.said ?? []).flatMap((link) => {
      const found = measure.of(link);
      return found === null || link.peer === one.node || !known.has(link.peer) ? [] : [{ from: one.node, to: link.peer, link, value: found }];
    }),
  );
  return { members, rows };
}

export function Links() {
  const [name, setName] = useState("bytes sent");
  const { value, error } = useEvery(10000, () => nodes<Link[]>("/links"));
  const measure = MEASURES[name]!;
  const { members, rows } = useMemo(() => rowsOf(value ?? [], measure), [value, measure]);
  if (!value) return <Trouble text={error} />;
  if (members.length < 2) return null;
  return (
    <>
      <h2>Links</h2>
      <Trouble text={error} />
      <div class="fields">
        <label>
          Colour by
          <select value={name} onChange={(event) => setName(event.currentTarget.value)}>
            {Object.keys(MEASURES).map((one) => (
              <option key={one}>{one}</option>
            ))}
          </select>
        </label>
      </div>
      {members.length <= MOST_NODES ? (
        <Map {...{ members, rows, measure }} />
      ) : (
        <>
          <Dots {...{ members, rows, measure }} />
          <List {...{ rows, measure, name }} />
        </>
      )}
    </>
  );
}

type Heated = { members: string[]; rows: Row[]; measure: (typeof MEASURES)[string] };

/// The heat of a value compared with all others: 0 to 5.
function heats({ rows, measure }: Heated): (value: number) => number {
  const most = rows.reduce((all, row) => Math.max(all, row.value), 1e-12);
  return (value) => {
    const part = measure.isLogarithmic ? Math.log1p((1000 * value) / most) / Math.log1p(1000) : value / most;
    return Math.min(5, Math.ceil(5 * part));
  };
}

function Map({ members, rows, measure }: Heated) {
  const heat = heats({ members, rows, measure });
  const byWay = new globalThis.Map(rows.map((row) => [`${row.from} ${row.to}`, row]));
  return (
    <Table name="Links" heads={["from / to", ...members.map((to) => `#${to}`)]}>
      {members.map((from) => (
        <tr key={from}>
          <th scope="row">{from}</th>
          {members.map((to) => {
            const row = byWay.get(`${from} ${to}`);
            return (
              <td key={to} class={row ? `number heat-${heat(row.value)}` : "number"} title={row && told(row)}>
                {row ? measure.shown(row.value) : ""}
              </td>
            );
          })}
        </tr>
      ))}
    </Table>
  );
}

/// A dot for each link: rows send to columns. The list beside it has the same for users who cannot see the dots.
function Dots({ members, rows, measure }: Heated) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const [hovered, setHovered] = useState("");
  const places = useMemo(() => new globalThis.Map(members.map((name, place) => [name, place])), [members]);
  const byPlace = useMemo(
    () => new globalThis.Map(rows.map((row) => [places.get(row.from)! * members.length + places.get(row.to)!, row])),
    [rows, places],
  );
  useEffect(() => {
    const context = canvas.current?.getContext("2d");
    if (!canvas.current || !context) return;
    const [red, green, blue] = getComputedStyle(canvas.current).color.match(/[\d.]+/g)!.map(Number);
    const heat = heats({ members, rows, measure });
    const image = context.createImageData(members.length, members.length);
    for (const [place, row] of byPlace) image.data.set([red!, green!, blue!, (255 * HEATS[heat(row.value)]!) / 100], 4 * place);
    context.putImageData(image, 0, 0);
  }, [byPlace, measure]);
  const point = (event: MouseEvent) => {
    const { left, top, width } = canvas.current!.getBoundingClientRect();
    const place = (at: number, from: number) => Math.floor(((at - from) * members.length) / width);
    const row = byPlace.get(place(event.clientY, top) * members.length + place(event.clientX, left));
    setHovered(row ? told(row) : "");
  };
  return (
    <figure>
      <canvas
        ref={canvas}
        width={members.length}
        height={members.length}
        role="img"
        aria-label={`Links between ${members.length} nodes`}
        onMouseMove={point}
        onMouseLeave={() => setHovered("")}
      />
      <figcaption>{hovered || `${count(rows.length)} links: a row sends, a column receives, both in the order of the nodes.`}</figcaption>
    </figure>
  );
}

const told = ({ from, to, link }: Row) =>
  `${from} to ${to}: ${bytes(link.sent_bytes)} sent, ${bytes(link.received_bytes)} received, ` +
  `${link.rtt_seconds === null ? "no round trip yet" : milliseconds(link.rtt_seconds)}, ${count(link.lost_packets)} of ${count(link.sent_packets)} packets lost`;

function List({ rows, measure, name }: { rows: Row[]; measure: (typeof MEASURES)[string]; name: string }) {
  const most = useMemo(() => [...rows].sort((a, b) => b.value - a.value).slice(0, MOST_LISTED), [rows]);
  return (
    <Table name="Links" heads={["from", "to", `#${name}`]}>
      {most.map((row) => (
        <tr key={`${row.from} ${row.to}`} title={told(row)}>
          <td>{row.from}</td>
          <td>{row.to}</td>
          <td class="number">{measure.shown(row.value)}</td>
        </tr>
      ))}
    </Table>
  );
}
