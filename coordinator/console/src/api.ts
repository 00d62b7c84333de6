// The answers of the coordinator and its nodes.

export interface Member {
  name: string;
  http: string;
  state: string;
  devices: number;
  partitions: number;
  protocol: number;
  silent_seconds: number;
}

export interface CoordinatorStatus {
  version: string;
  uptime_seconds: number;
  epoch: string;
  follows: boolean;
  leader: string | null;
  nodes: Member[];
  lost: { name: string; http: string; silent_seconds: number }[];
}

export interface Actor {
  device: number;
  policy: string;
  chunks: number;
  arena_bytes: number;
  used_bytes: number;
  pinned_bytes: number;
  sessions: number;
  pins: number;
  tokens_asked: number;
  tokens_hit: number;
  evictions: number;
  disk: { chunks: number; used_bytes: number; capacity_bytes: number; waiting_bytes: number } | null;
  disk_trouble: string | null;
}

export interface NodeStatus {
  name: string;
  version: string;
  ready: boolean;
  uptime_seconds: number;
  actors: Actor[];
  cluster: { epoch: string; members: number; silent: string[]; zone?: string | null; refused: string | null } | null;
  hardware: { devices: { advice: string | null }[]; mismatches: string[] } | null;
  object: { trouble: string | null } | null;
  drain: { left_seconds: number; found_chunks: number; moved_chunks: number } | null;
}

/// A finding of `larder doctor` at a node's host.
export interface Finding {
  check: string;
  level: "ok" | "note" | "warning" | "problem";
  found: string;
  advice: string | null;
}

export interface Evicted {
  unix_ms: number;
  rule: string;
  worth: number;
}

export interface Run {
  from: number;
  to: number;
  outcome: string;
  tier: string | null;
  evicted: Evicted | null;
}

export interface Other {
  fingerprint: string;
  model: string;
  differing: string[];
  chunks: number;
  has_chunk: boolean | null;
}

export interface Lookup {
  device: number;
  number: number;
  unix_ms: number;
  kind: string;
  request: string | null;
  trace: string | null;
  tenant: string;
  namespace: string;
  chunk_tokens: number;
  prompt_tokens: number;
  chunks: number;
  found_chunks: number;
  refused: string | null;
  runs: Run[];
  other_namespaces: Other[];
  hashes: string[];
}

export interface Chain {
  device: number;
  knows_namespace: boolean;
  runs: Run[];
  other_namespaces: Other[];
  stays?: Stay[];
  evicted_after_seconds?: number | null;
}

export interface Stay {
  from: number;
  to: number;
  keeper: "pin" | "use" | "continuation" | "nothing";
  pin_seconds_left: number | null;
  idle_seconds: number;
}

export interface Namespace {
  tenant: string;
  model: string;
  fingerprint: string;
  chunk_tokens: number;
  hash: { name: string; seed?: string; block_tokens?: number } | null;
  sessions: number;
  chunks: number;
}

export interface Tenant {
  tenant: string;
  sessions: number;
  pins: number;
  pinned_bytes: number;
  arena_bytes: number;
  arena_limit_bytes: number;
}

export interface Session {
  device: number;
  session: number;
  tenant: string;
  client: string;
  pid: number | null;
  fingerprints: string[];
  last_request: string | null;
  idle_ms: number | null;
  leases: number;
}

export interface Pin {
  device: number;
  pin: number;
  tenant: string;
  chunks: number;
  bytes: number;
  seconds_left: number;
}

export interface Prefix {
  cluster: { chunks: number; tokens: number };
  nodes: { name: string; chunks: number; tokens: number; cost_tokens: number }[];
  silent_homes: string[];
  hashes?: string[];
}

export interface Link {
  peer: string;
  sent_bytes: number;
  received_bytes: number;
  rtt_seconds: number | null;
  sent_packets: number;
  lost_packets: number;
}

export interface Usage {
  tenant: string;
  namespace: string;
  tokens_asked: number;
  hits: { tier: string; tokens: number }[];
  prefill_seconds_saved: number;
}

export interface HotPrefix {
  parent: number | null;
  namespace: string;
  first_chunk: string;
  from: number;
  to: number;
  tokens: number;
  lookups: number;
  hits: number;
}

export interface Moment {
  unix_ms: number;
  nodes: number;
  silent: number;
  arena_bytes: number;
  used_bytes: number;
  sessions: number;
  tokens_asked: number;
  tokens_hit: number;
  evictions: number;
}

export interface Purged {
  memory_chunks: number;
  memory_bytes: number;
  read_chunks: number;
  disk_chunks: number;
  objects: number;
}

export interface Pinned {
  device: number;
  pin: number;
  chunks: number;
  seconds: number;
}

export interface Tried {
  /// Null for the policy that each node has.
  policy: string | null;
  /// Null for nodes that never evict.
  times: number | null;
  ways: "as_they_are" | "apart" | "together" | "routed";
  capacity_chunks: number;
  tokens_hit: number;
  tokens_moved: number;
}

export interface Played {
  nodes: number;
  shares: boolean;
  policies: string[];
  chunk_bytes: number;
  warming_lookups: number;
  counted_lookups: number;
  left_out_lookups: number;
  counted_seconds: number;
  distinct_chunks: number;
  tokens_asked: number;
  tokens_found: number;
  tried: Tried[];
}

export interface WhatIf {
  running: boolean;
  age_seconds: number | null;
  left_out: { node: string; error: string }[];
  played: Played | null;
}

/// One node's answer, or the reason that there is none.
export interface Said<T> {
  node: string;
  said: T | null;
  error: string | null;
}

/// Takes the token of the address, if there is one: the link from the coordinator's administrator ends with `#token=...`. The token
/// stays in this tab.
export function takeToken(): boolean {
  const given = /(?:^#|&)token=([^&]+)/.exec(location.hash)?.[1];
  if (!given) return false;
  let token = given;
  try {
    token = decodeURIComponent(given);
  } catch {
    // Its percent signs stand for themselves.
  }
  sessionStorage.setItem("token", token);
  history.replaceState(null, "", location.pathname);
  return true;
}

async function ask(path: string, body?: unknown): Promise<unknown> {
  const token = sessionStorage.getItem("token");
  const headers: Record<string, string> = token ? { authorization: `Bearer ${token}` } : {};
  if (body !== undefined) headers["content-type"] = "application/json";
  const answer = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (!answer.ok) throw new Error((await answer.text()).trim() || `the coordinator answers ${answer.status}`);
  return answer.json();
}

export const status = () => ask("/status") as Promise<CoordinatorStatus>;

/// The last hour, a moment each 10 seconds.
export const hour = () => ask("/console/history") as Promise<Moment[]>;

export const whatIf = () => ask("/console/what_if") as Promise<WhatIf>;

export const prefix = (body: unknown) => ask("/v1/prefix", body) as Promise<Prefix>;

/// The tokens of a text, by the coordinator's tokenizer of the model.
export const tokens = (model: string, text: string, bare: boolean) =>
  ask("/console/tokens", { model, text, without_special_tokens: bare }) as Promise<{ tokens: number[] }>;

/// Whether this tab was given a token. Only an admin's token allows changes.
export const hasToken = () => sessionStorage.getItem("token") !== null;

/// A change that an admin asks of one node, or of all.
export type Change =
  | { action: "policy"; policy: string; node?: string }
  | { action: "drain"; node: string; within_seconds: number }
  | { action: "cancel_drain"; node: string }
  | { action: "pin"; fingerprint: string; hashes: string[]; within_seconds: number }
  | { action: "unpin"; node: string; device: number; pin: number }
  | { action: "purge"; tenant?: string; namespace?: string; hashes: string[]; dry_run: boolean }
  | { action: "forget"; node: string };

/// Asks for a change. Returns what each node did or refused.
export function change(wanted: Change): Promise<Said<true | Purged | Pinned[]>[]> {
  return ask("/console/change", wanted) as Promise<Said<true | Purged | Pinned[]>[]>;
}

/// Asks all nodes, or one, by way of the coordinator.
export function nodes<T>(path: string, body?: unknown, node?: string): Promise<Said<T>[]> {
  const query = new URLSearchParams({ path });
  if (node) query.set("node", node);
  return ask(`/console/nodes?${query}`, body) as Promise<Said<T>[]>;
}
