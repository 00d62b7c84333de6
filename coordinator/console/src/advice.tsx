// Advice: problems of the cluster and their remedies. The same advice for several nodes appears once.

import { nodes, type CoordinatorStatus, type Finding, type NodeStatus, type Said } from "./api";
import { count, seconds, useEvery } from "./show";

type ByText = Map<string, string[]>;

function add(byText: ByText, node: string, text: string | null | undefined) {
  if (text) byText.set(text, [...(byText.get(text) ?? []), node]);
}

function adviceByNode(cluster: CoordinatorStatus, said: Said<NodeStatus>[]): ByText {
  const byText: ByText = new Map();
  const tell = (node: string, text: string | null | undefined) => add(byText, node, text);
  for (const lost of cluster.lost) tell(lost.name, `Lost ${seconds(lost.silent_seconds)} ago: start the node again, and read the end of its log.`);
  for (const { node, said: status, error } of said) {
    tell(node, error && `The coordinator gets no answer (${error}): check that the process runs, and that UDP packets reach its peer address.`);
    if (!status) continue;
    if (!status.ready) tell(node, "The node is not ready: an actor does not answer, or the arena is being made.");
    for (const device of status.hardware?.devices ?? []) tell(node, device.advice && `For more huge pages: ${device.advice}.`);
    for (const mismatch of status.hardware?.mismatches ?? []) tell(node, mismatch);
    tell(node, status.object?.trouble);
    tell(node, status.cluster?.refused && `The coordinator does not let the node join: ${status.cluster.refused}.`);
    for (const silent of status.cluster?.silent ?? []) tell(node, `The node gets no answer from ${silent}: check the network between the two nodes.`);
    for (const actor of status.actors) {
      tell(node, actor.disk_trouble);
      if (actor.pinned_bytes > actor.arena_bytes / 2) tell(node, "Pins hold more than half of an arena: end some pins, or pin for a shorter time.");
    }
  }
  return byText;
}

/// Findings of `larder doctor` at these levels; a node of an earlier version has none.
function foundByNode(said: Said<Finding[]>[], ...levels: Finding["level"][]): ByText {
  const byText: ByText = new Map();
  for (const { node, said: findings } of said) {
    for (const { check, level, found, advice } of findings ?? []) {
      if (levels.includes(level)) add(byText, node, `${check}: ${found}${advice ? `. ${advice[0]?.toUpperCase()}${advice.slice(1)}` : ""}.`);
    }
  }
  return byText;
}

export function Advice({ cluster, said }: { cluster: CoordinatorStatus; said: Said<NodeStatus>[] }) {
  const { value } = useEvery(60000, () => nodes<Finding[]>("/doctor"));
  const all = [...adviceByNode(cluster, said), ...foundByNode(value ?? [], "problem", "warning")];
  const notes = [...foundByNode(value ?? [], "note")];
  if (all.length + notes.length === 0) return null;
  return (
    <section aria-label="Advice">
      <h2>Advice</h2>
      <Texts all={all} />
      {notes.length > 0 && (
        <details>
          <summary>Notes of larder doctor about the hosts: {count(notes.length)}</summary>
          <Texts all={notes} />
        </details>
      )}
    </section>
  );
}

const Texts = ({ all }: { all: [string, string[]][] }) => (
  <ul>
    {all.map(([text, members]) => (
      <li key={text}>
        <strong>{members.length > 5 ? `${members.slice(0, 5).join(", ")} and ${members.length - 5} more` : members.join(", ")}</strong>: {text}
      </li>
    ))}
  </ul>
);
