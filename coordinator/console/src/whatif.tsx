// What if: the last lookups of all nodes, played again through clusters of other sizes, policies and ways to work together.

import { whatIf, type Played, type Tried } from "./api";
import { Table, Trouble, bytes, count, seconds, share, useEvery } from "./show";

const points = (part: number, present: number, whole: number) => {
  const difference = (100 * (part - present)) / Math.max(1, whole);
  return Math.abs(difference) < 0.05 ? "" : `${difference > 0 ? "+" : "−"}${Math.abs(difference).toFixed(1)}`;
};

interface RowsProps {
  name: string;
  first: string;
  rows: Tried[];
  present: Tried;
  played: Played;
  head: (row: Tried) => string;
}

function Rows({ name, first, rows, present, played, head }: RowsProps) {
  const asked = played.tokens_asked;
  return (
    <Table name={name} heads={[first, "#chunks", "#memory and disk", "tokens hit", "", "#points", "#read from others"]}>
      {rows.map((row) => (
        <tr key={`${row.policy} ${row.times} ${row.ways}`} class={row === present ? "present" : ""}>
          <td>{head(row)}</td>
          <td class="number">{count(row.capacity_chunks)}</td>
          <td class="number">{bytes(row.capacity_chunks * played.chunk_bytes)}</td>
          <td>
            <meter min={0} max={asked || 1} value={row.tokens_hit} aria-label="tokens hit" />
          </td>
          <td class="number">{share(row.tokens_hit, asked)}</td>
          <td class="number">{points(row.tokens_hit, present.tokens_hit, asked)}</td>
          <td class="number">{share(row.tokens_moved, asked)}</td>
        </tr>
      ))}
    </Table>
  );
}

const WAYS = {
  as_they_are: "as it is",
  apart: "no node reads others' chunks",
  together: "each node reads others' chunks",
  routed: "a router sends each request where it costs least",
};

function Tables({ played }: { played: Played }) {
  const present = played.tried.find((one) => one.policy === null && one.times === 1 && one.ways === "as_they_are");
  if (!present) return null;
  const all = { played, present };
  const policies = played.policies.join(", ");
  const ofPolicies = played.tried.filter((one) => one.policy !== null || one === present);
  const ofWays = played.tried.filter((one) => one.policy === null && one.times === 1);
  const alone = played.nodes === 1;
  const others = alone ? "" : played.shares ? ", and nodes read each other's chunks" : ", and nodes do not read each other's chunks";
  return (
    <>
      <p>
        The last lookups, played again through {alone ? "the store of one node" : `the stores of ${count(played.nodes)} nodes`}:{" "}
        {count(played.warming_lookups)} lookups fill {alone ? "the store" : "the stores"}; the next {count(played.counted_lookups)}, made within{" "}
        {seconds(played.counted_seconds)}, are counted. Each lookup goes to the node where it was made{others}. Chunks on disk count as chunks in memory.{" "}
        When the lookups were made, {share(played.tokens_found, played.tokens_asked)} of the tokens were found.
      </p>
      {played.left_out_lookups > 0 && (
        <p>{count(played.left_out_lookups)} lookups are left out: they are too many, have chunks of another size, or contradict other lookups.</p>
      )}
      <h2>More memory or disk</h2>
      <Rows
        name="Sizes"
        first="size of each node"
        rows={played.tried.filter((one) => one.policy === null && one.ways === "as_they_are").sort((a, b) => (a.times ?? Infinity) - (b.times ?? Infinity))}
        head={(row) => (row.times === null ? "never evicts" : row.times === 1 ? "as it is" : `${row.times} times`)}
        {...all}
      />
      <h2>Another policy</h2>
      <Rows
        name="Policies"
        first="policy"
        rows={ofPolicies.sort((a, b) => b.tokens_hit - a.tokens_hit)}
        head={(row) => row.policy ?? `${policies}, as it is`}
        {...all}
      />
      {ofWays.length > 1 && (
        <>
          <h2>Another way to work together</h2>
          <Rows name="Ways" first="nodes" rows={ofWays} head={(row) => WAYS[row.ways]} {...all} />
        </>
      )}
    </>
  );
}

export function WhatIfPage() {
  const { value, error } = useEvery(4000, whatIf);
  if (!value) return <Trouble text={error} />;
  return (
    <>
      <Trouble text={error} />
      {value.left_out.map((one) => (
        <Trouble key={one.node} text={`${one.node} is left out: ${one.error}`} />
      ))}
      {value.running && <p>Lookups are being played.</p>}
      {value.played ? <Tables played={value.played} /> : !value.running && <p>No node has recorded a lookup that can be played.</p>}
    </>
  );
}
