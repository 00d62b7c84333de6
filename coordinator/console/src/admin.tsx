// Changes by an admin: the policy of nodes, drains, lost nodes, pins and purges.

import { useState } from "preact/hooks";
import { change, hasToken, type Change, type Pinned, type Purged, type Said } from "./api";
import { Trouble, count, seconds } from "./show";

const POLICIES = ["adaptive", "fifo", "filo", "lru", "mru", "lfu", "slru", "priority", "arc", "s3fifo", "sieve", "wtinylfu"];

/// What the nodes did, in words; empty if there is nothing to say.
function outcome(said: Said<true | Purged | Pinned[]>[]): string {
  const done = said.flatMap((one) => (one.said && one.said !== true ? [one.said] : []));
  const purged = done.filter((one): one is Purged => !Array.isArray(one));
  const pins = done.filter(Array.isArray).flat() as Pinned[];
  const sum = (of: (one: Purged) => number) => purged.reduce((all, one) => all + of(one), 0);
  if (purged.length > 0) {
    return `${count(sum((one) => one.memory_chunks))} chunks in memory, ${count(sum((one) => one.disk_chunks))} on disk, ${count(sum((one) => one.objects))} objects removed.`;
  }
  if (done.length === 0) {
    const nodes = said.filter((one) => one.said === true).length;
    return nodes === 0 ? "" : `Done at ${count(nodes)} ${nodes === 1 ? "node" : "nodes"}.`;
  }
  if (pins.length === 0) return "No device has the first chunk in memory.";
  return `Pinned at ${count(pins.length)} devices, ${count(Math.max(...pins.map((pin) => pin.chunks)))} chunks at most, for ${seconds(Math.min(...pins.map((pin) => pin.seconds)))}.`;
}

interface Asked {
  what: string;
  wanted: Change;
}

/// Makes a change when the user asks for it a second time. Another change begins anew, without the result of the one before.
const Do = (asked: Asked) => <Once key={JSON.stringify(asked.wanted)} {...asked} />;

function Once({ what, wanted }: Asked) {
  const [state, setState] = useState<"idle" | "sure" | "asking">("idle");
  const [done, setDone] = useState("");
  const [trouble, setTrouble] = useState("");
  const press = async () => {
    if (state === "idle") return setState("sure");
    setState("asking");
    setDone("");
    setTrouble("");
    try {
      const said = await change(wanted);
      setDone(outcome(said));
      setTrouble(said.filter((one) => one.error).map((one) => `${one.node}: ${one.error}`).join("; "));
    } catch (error) {
      setTrouble((error as Error).message);
    }
    setState("idle");
  };
  return (
    <>
      <button onClick={press} onBlur={() => setState((now) => (now === "sure" ? "idle" : now))} disabled={state === "asking"}>
        {state === "sure" ? `${what}: sure?` : what}
      </button>
      {done && <p role="status">{done}</p>}
      <Trouble text={trouble} />
    </>
  );
}

export const DrainNode = ({ node, drains }: { node: string; drains: boolean }) =>
  !hasToken() ? null : drains ? (
    <Do what="Stop draining" wanted={{ action: "cancel_drain", node }} />
  ) : (
    <Do what="Drain" wanted={{ action: "drain", node, within_seconds: 300 }} />
  );

export const ForgetNode = ({ node }: { node: string }) =>
  hasToken() ? <Do what="Forget" wanted={{ action: "forget", node }} /> : null;

export function Policy() {
  const [policy, setPolicy] = useState("adaptive");
  if (!hasToken()) return null;
  return (
    <div class="fields">
      <label>
        Eviction policy
        <select value={policy} onChange={(event) => setPolicy(event.currentTarget.value)}>
          {POLICIES.map((name) => (
            <option key={name}>{name}</option>
          ))}
        </select>
      </label>
      <Do what="Set on all nodes" wanted={{ action: "policy", policy }} />
    </div>
  );
}

export const Purge = ({ tenant, namespace, hashes = [] }: { tenant?: string; namespace?: string; hashes?: string[] }) =>
  hasToken() ? <Do what="Purge" wanted={{ action: "purge", tenant, namespace, hashes, dry_run: false }} /> : null;

export const PinChunks = ({ fingerprint, hashes }: { fingerprint: string; hashes: string[] }) =>
  hasToken() ? <Do what="Pin for 10 minutes" wanted={{ action: "pin", fingerprint, hashes, within_seconds: 600 }} /> : null;

export const Unpin = ({ node, device, pin }: { node: string; device: number; pin: number }) =>
  hasToken() ? <Do what="Unpin" wanted={{ action: "unpin", node, device, pin }} /> : null;
