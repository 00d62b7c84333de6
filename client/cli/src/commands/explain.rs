//! `larder explain`: why a prompt was a miss.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use larder_node::{ChainStatus, LookupStatus, RunStatus};
use larder_protocol::ChunkHash;
use larder_protocol::identity::Identity;
use serde::Serialize;

use crate::failure::{FAILED, Usage};
use crate::listing::{Cell, Format, FormatArgs, Listing, column, wide};
use crate::prompt::{PromptArgs, TextArgs};
use crate::survey::{Servers, Surveyed};
use crate::{dev, http, output};

/// Explain why a prompt was a miss
///
/// Every node keeps its last lookups with the outcome of each chunk, and remembers its last million evictions. Name a request by
/// the engine's own id (vLLM's request id) or by its trace id. Or name a prompt: then the answer says which chunks each node has
/// now, and why the others are missing. Without a request or a prompt, the command lists the last lookups with a miss.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder explain                                     The last lookups with a miss, in the newest development cluster
  larder explain chatcmpl-5f2a                       A request, by vLLM's request id
  larder explain 0af7651916cd43dd8448eb211c80319c    A request, by its trace id
  larder explain --namespace qwen.json --tokens prompt.json --tenant chat
  larder explain --namespace qwen.json --text prompt.txt --tokenizer qwen/tokenizer.json
  larder explain chatcmpl-5f2a --json | jq '.[].runs'

Outcomes of chunks:
  found            in memory, on disk, at another node or in the object store: no miss
  behind_gap       the chunk was there, but a chunk before it is missing: KV is useful only with its whole prefix
  computed_faster  the chunk was there, but the engine computes it sooner than it would arrive
  not_asked        nobody looked for the chunk: at least one token is left to compute, or the engine cannot use a hit
  being_written    another request was computing the chunk at that moment
  evicted          the chunk was evicted: with the time, the rule, and the chunk's worth (tokens of prefill saved for each GiB and second).
                   watermark and need: there is too little memory (`larder plan` says how much more memory helps); clearing: memory went
                   to another block size or tenant; disk: the disk dropped it; moved: another actor has it; purged; damaged
  never_stored     no node has had the chunk since the node's start: the prompt differs, or nobody saved it. The answer names the fields
                   in which other namespaces of the tenant differ: engines share chunks only if all fields agree
  unknown          the chunk is not here, and older evictions are forgotten
  home_silent, peer_silent, deadline, busy, not_held, broken, damaged, unreadable
                   a node, a connection or a tier did not deliver: see `larder status` and the troubleshooting page
  refused          the request was refused: the answer says why

Exit status: 1 if no node knows the request, or a node or one of its actors does not answer, or a node is lost (`larder forget`);
2 after wrong arguments.")]
pub(crate) struct Args {
    /// The engine's id of a request, or a trace id
    #[arg(value_name = "REQUEST", conflicts_with_all = ["tokens", "hashes", "text"])]
    request: Option<String>,

    /// The prompt's token ids: a JSON array, or numbers between white space; `-` reads standard input
    #[arg(long, value_name = "FILE", conflicts_with = "hashes", requires = "namespace")]
    tokens: Option<PathBuf>,

    /// The hashes of the prompt's full chunks, first to last: 64 hexadecimal digits each; `-` reads standard input
    #[arg(long, value_name = "FILE", requires = "namespace")]
    hashes: Option<PathBuf>,

    #[command(flatten)]
    text: TextArgs,

    /// File of the prompt's namespace, as for `larder lookup`
    #[arg(long, value_name = "FILE")]
    namespace: Option<PathBuf>,

    /// The prompt's tenant [default: `default`]; in a list, only lookups of this tenant
    #[arg(long, value_name = "TENANT")]
    tenant: Option<String>,

    /// List at most this number of lookups
    #[arg(long, value_name = "N", default_value_t = 20)]
    most: usize,

    #[command(flatten)]
    servers: Servers,

    #[command(flatten)]
    format: FormatArgs,
}

/// A lookup, and the node that served it.
#[derive(Debug, Clone, Serialize)]
struct Explained {
    node: String,
    #[serde(flatten)]
    lookup: LookupStatus,
    /// Chunks that the serving node never had and another node evicted, ordered by position.
    evicted_elsewhere: Vec<Elsewhere>,
}

/// Chunks that another node evicted.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Elsewhere {
    node: String,
    #[serde(flatten)]
    run: RunStatus,
}

/// The chunks of a prompt that a device has.
#[derive(Debug, Serialize)]
struct Held {
    node: String,
    #[serde(flatten)]
    chain: ChainStatus,
}

/// The question, as nodes read it.
#[derive(Debug, Serialize)]
struct ExplainQuestion {
    fingerprint: String,
    hashes: Vec<String>,
}

/// Answers of nodes, and why other nodes gave none.
struct Answers<T> {
    came: Vec<T>,
    silent: Vec<String>,
}

impl<T> Answers<T> {
    /// Adds the answers to another question. A node that fails twice for one reason is named once.
    fn add(&mut self, more: Self) {
        self.came.extend(more.came);
        for silent in more.silent {
            if !self.silent.contains(&silent) {
                self.silent.push(silent);
            }
        }
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let survey = args.servers.targets()?.survey()?;
    let (lost, nodes, format) = (survey.lost(), survey.nodes, args.format);
    if args.tokens.is_some() || args.hashes.is_some() || args.text.text.is_some() {
        let question = args.question()?;
        let mut answers = ask_all(&nodes, |http| http::post_json(&http, "/explain", &question), Held::new);
        answers.silent.extend(lost);
        format.print(&answers.came, |format| held_table(&answers.came, format))?;
        return Ok(exit(&answers.silent, answers.came.is_empty()));
    }
    let queries = args.queries();
    let mut all = Answers { came: Vec::new(), silent: lost };
    for query in &queries {
        all.add(ask_all(&nodes, |http| http::get_json(&http, query), Explained::new));
    }
    all.came.sort_by_key(|explained| std::cmp::Reverse(explained.lookup.unix_ms));
    let Some(request) = &args.request else {
        all.came.truncate(args.most);
        format.print(&all.came, |format| list(&all.came, format))?;
        return Ok(exit(&all.silent, false));
    };
    let silent = all.came.iter_mut().flat_map(|explained| explained.ask_others(&nodes)).collect();
    all.add(Answers { came: Vec::new(), silent });
    if all.came.is_empty() && format.format() != Format::Json {
        output::note(format_args!(
            "no node knows the request {request}: name an engine's request id or a trace id; a node keeps about its last thousand lookups"
        ));
    } else {
        format.print(&all.came, |format| tables(&all.came, format))?;
    }
    Ok(exit(&all.silent, all.came.is_empty()))
}

impl Args {
    fn question(&self) -> anyhow::Result<ExplainQuestion> {
        let tenant = self.tenant.as_deref().unwrap_or(dev::TENANT);
        if Identity::engine(tenant, "x").to_string().parse::<Identity>().is_err() {
            return Err(Usage(format!("--tenant: `{tenant}` is no tenant's name")).into());
        }
        let files = PromptArgs::of_files(&self.tokens, &self.hashes, &self.text, &self.namespace);
        let (spec, prompt) = files.read()?;
        let fingerprint = spec.fingerprint(tenant);
        let hashes = prompt.hashes(fingerprint, spec.chunk_tokens);
        Ok(ExplainQuestion {
            fingerprint: ChunkHash(fingerprint.0).to_string(),
            hashes: hashes.iter().map(ToString::to_string).collect(),
        })
    }

    /// The queries to nodes. A text that looks like a trace id may also be a request's id, so both are asked for.
    fn queries(&self) -> Vec<String> {
        let Some(request) = &self.request else {
            let tenant = self.tenant.as_deref().map(|tenant| format!("&tenant={}", encoded(tenant)));
            return vec![format!("/lookups?misses=1&most={}{}", self.most, tenant.unwrap_or_default())];
        };
        let mut queries = vec![format!("/lookups?most=20&request={}", encoded(request))];
        if request.len() == 32 && request.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            queries.push(format!("/lookups?most=20&trace={request}"));
        }
        queries
    }
}

impl Explained {
    fn new(node: &str, lookup: LookupStatus) -> Self {
        Self { node: node.to_owned(), lookup, evicted_elsewhere: Vec::new() }
    }

    /// Asks the other nodes whether they evicted chunks that the serving node never had. Returns why nodes gave no answer.
    fn ask_others(&mut self, nodes: &[Surveyed]) -> Vec<String> {
        let LookupStatus { namespace, hashes, runs, unix_ms, .. } = &self.lookup;
        let is_open = |run: &RunStatus| matches!(run.outcome.as_str(), "never_stored" | "unknown");
        if !runs.iter().any(is_open) {
            return Vec::new();
        }
        let mut silent = Vec::new();
        let question = ExplainQuestion { fingerprint: namespace.clone(), hashes: hashes.clone() };
        let others = nodes.iter().filter(|node| node.name != self.node && node.said.is_ok());
        for node in others {
            let chains: Vec<ChainStatus> =
                http::post_json(&node.http, "/explain", &question).unwrap_or_else(|error| {
                    silent.push(format!("{}: {error:#}", node.name));
                    Vec::new()
                });
            let evictions = chains.into_iter().flat_map(|chain| chain.runs);
            let before =
                |run: &RunStatus| run.evicted.as_ref().is_some_and(|evicted| evicted.unix_ms <= *unix_ms);
            for run in evictions.filter(before) {
                let overlap = |open: &&RunStatus| is_open(open) && run.from < open.to && open.from < run.to;
                for open in runs.iter().filter(overlap) {
                    let run =
                        RunStatus { from: run.from.max(open.from), to: run.to.min(open.to), ..run.clone() };
                    self.evicted_elsewhere.push(Elsewhere { node: node.name.clone(), run });
                }
            }
        }
        self.evicted_elsewhere.sort_by_key(|one| (one.run.from, one.run.to));
        silent
    }

    fn heading(&self) -> String {
        let LookupStatus { kind, tenant, device, found_chunks, chunks, chunk_tokens, .. } = &self.lookup;
        let ago = output::duration(seconds_since(self.lookup.unix_ms));
        let named = self.lookup.request.as_deref().map(|name| format!(" {name}")).unwrap_or_default();
        let tokens = |chunks: u64| output::count(chunks * u64::from(*chunk_tokens));
        let mut text = format!(
            "{kind}{named} of tenant {tenant} at {}, device {device}, {ago} ago: {} of {} chunks could be used ({} of {} tokens)\n",
            self.node,
            output::count(*found_chunks),
            output::count(*chunks),
            tokens(*found_chunks),
            tokens(*chunks)
        );
        if let Some(why) = &self.lookup.refused {
            text += &format!("The request was refused: {why}\n");
        }
        text
    }

    fn add_runs(&self, list: &mut Listing) {
        for run in &self.lookup.runs {
            list.add(run_cells(&self.node, run, self.lookup.unix_ms));
        }
        for Elsewhere { node, run } in &self.evicted_elsewhere {
            list.add(run_cells(node, run, self.lookup.unix_ms));
        }
    }

    fn table(&self) -> String {
        let mut list = Listing::new(&RUN_COLUMNS.map(column));
        self.add_runs(&mut list);
        let mut text = self.heading() + &list.text(Format::Table);
        for other in &self.lookup.other_namespaces {
            let has = match other.has_chunk {
                Some(true) => "has the missing chunk",
                Some(false) => "does not have the missing chunk",
                None => "hashes the same tokens to other names",
            };
            text += &format!(
                "Namespace {} ({}) has {} chunks of this tenant and {has}; it differs in {}.\n",
                &other.fingerprint[..16.min(other.fingerprint.len())],
                other.model,
                output::count(other.chunks),
                other.differing.join(", ")
            );
        }
        text
    }

    /// The request's misses by outcome, the most frequent first.
    fn misses(&self) -> String {
        let mut counts = BTreeMap::<&str, u32>::new();
        for run in &self.lookup.runs {
            if !matches!(run.outcome.as_str(), "found" | "not_asked") {
                *counts.entry(&run.outcome).or_default() += run.to - run.from;
            }
        }
        let mut counts: Vec<(&str, u32)> = counts.into_iter().collect();
        counts.sort_by_key(|&(_, chunks)| std::cmp::Reverse(chunks));
        let named =
            counts.into_iter().map(|(outcome, chunks)| format!("{outcome} {}", output::count(chunks.into())));
        named.collect::<Vec<_>>().join(", ")
    }
}

impl Held {
    fn new(node: &str, chain: ChainStatus) -> Self {
        Self { node: node.to_owned(), chain }
    }
}

/// The explanations for people; for programs, the runs of all of them.
fn tables(all: &[Explained], format: Format) -> String {
    if format == Format::Tsv {
        let mut list = Listing::new(&RUN_COLUMNS.map(column));
        all.iter().for_each(|explained| explained.add_runs(&mut list));
        return list.text(format);
    }
    all.iter().map(Explained::table).collect::<Vec<_>>().join("\n")
}

fn list(all: &[Explained], format: Format) -> String {
    let mut list = Listing::new(&[
        column("ago"),
        column("node"),
        column("request"),
        column("chunks"),
        column("found"),
        column("misses"),
        wide("tenant"),
        wide("kind"),
        wide("trace"),
    ]);
    for explained in all {
        let lookup = &explained.lookup;
        list.add([
            Cell::Seconds(seconds_since(lookup.unix_ms)),
            explained.node.as_str().into(),
            Cell::of(lookup.request.clone(), Cell::from),
            Cell::Count(lookup.chunks),
            Cell::Count(lookup.found_chunks),
            explained.misses().into(),
            lookup.tenant.as_str().into(),
            lookup.kind.as_str().into(),
            Cell::of(lookup.trace.clone(), Cell::from),
        ]);
    }
    list.text(format)
}

fn held_table(held: &[Held], format: Format) -> String {
    let mut list = Listing::new(&RUN_COLUMNS.map(column));
    let now = now_ms();
    for Held { node, chain } in held {
        if chain.knows_namespace {
            chain.runs.iter().for_each(|run| list.add(run_cells(node, run, now)));
        } else {
            list.add([
                "all".into(),
                "never_stored".into(),
                Cell::Unknown,
                node.as_str().into(),
                UNKNOWN_NAMESPACE.into(),
            ]);
        }
    }
    list.text(format)
}

fn run_cells(node: &str, run: &RunStatus, at_ms: u64) -> [Cell; 5] {
    let chunks = match run.to - run.from {
        1 => run.from.to_string(),
        _ => format!("{} to {}", run.from, run.to - 1),
    };
    let detail = run.evicted.as_ref().map(|evicted| {
        let before = output::duration(at_ms.saturating_sub(evicted.unix_ms) as f64 / 1_000.0);
        format!("by {}, {before} before, worth {:.1}", evicted.rule, evicted.worth)
    });
    [
        chunks.into(),
        run.outcome.as_str().into(),
        Cell::of(run.tier.clone(), Cell::from),
        node.into(),
        Cell::of(detail, Cell::from),
    ]
}

/// Asks every node for a list, and joins the lists.
fn ask_all<A, T>(
    nodes: &[Surveyed],
    ask: impl Fn(&str) -> anyhow::Result<Vec<A>>,
    make: impl Fn(&str, A) -> T,
) -> Answers<T> {
    let mut answers = Answers { came: Vec::new(), silent: Vec::new() };
    for node in nodes {
        let answer = match &node.said {
            Ok(_) => ask(&node.http).map_err(|error| format!("{}: {error:#}", node.name)),
            Err(error) => Err(format!("{} does not answer: {error}", node.name)),
        };
        match answer {
            Ok(list) => {
                answers.came.extend(list.into_iter().map(|one| make(&node.name, one)));
                answers.silent.extend(node.silent_actors());
            }
            Err(error) => answers.silent.push(error),
        }
    }
    answers
}

fn exit(silent: &[String], is_unknown: bool) -> ExitCode {
    silent.iter().for_each(|silent| output::note(format_args!("{silent}")));
    if silent.is_empty() && !is_unknown { ExitCode::SUCCESS } else { ExitCode::from(FAILED) }
}

/// Encodes a value for a query.
fn encoded(value: &str) -> String {
    let byte = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    value.bytes().map(byte).collect()
}

fn seconds_since(unix_ms: u64) -> f64 {
    now_ms().saturating_sub(unix_ms) as f64 / 1_000.0
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}

const RUN_COLUMNS: [&str; 5] = ["chunks", "outcome", "tier", "node", "detail"];

const UNKNOWN_NAMESPACE: &str = "the node does not know this namespace";

#[cfg(test)]
mod tests {
    use larder_node::EvictedStatus;

    use super::*;

    fn explained() -> Explained {
        let now_ms = now_ms();
        let run = |from, to, outcome: &str| RunStatus {
            from,
            to,
            outcome: outcome.into(),
            tier: (outcome == "found").then(|| "host".into()),
            evicted: (outcome == "evicted").then(|| EvictedStatus {
                unix_ms: now_ms - 60_000,
                rule: "watermark".into(),
                worth: 12.25,
            }),
        };
        Explained {
            node: "node-0".into(),
            lookup: LookupStatus {
                device: 0,
                number: 1,
                unix_ms: now_ms,
                kind: "prefetch".into(),
                request: Some("req-7".into()),
                trace: None,
                tenant: "chat".into(),
                namespace: "0".repeat(64),
                chunk_tokens: 16,
                prompt_tokens: 100,
                first_index: 0,
                chunks: 6,
                found_chunks: 1,
                refused: None,
                runs: vec![run(0, 1, "found"), run(1, 4, "evicted"), run(4, 6, "behind_gap")],
                other_namespaces: Vec::new(),
                hashes: Vec::new(),
            },
            evicted_elsewhere: Vec::new(),
        }
    }

    #[test]
    fn a_node_that_fails_at_one_of_two_questions_is_named_once() {
        let silent = |silent: &[&str]| Answers::<()> {
            came: Vec::new(),
            silent: silent.iter().map(|&said| said.to_owned()).collect(),
        };
        let mut all = silent(&["a: busy", "b: gone"]);
        all.add(silent(&["b: gone"]));
        all.add(silent(&["c: busy"]));
        assert_eq!(all.silent, ["a: busy", "b: gone", "c: busy"]);
    }

    #[test]
    fn another_node_that_does_not_answer_is_named() {
        let words = serde_json::json!({"name": "node-1", "ready": true, "uptime_seconds": 1.0, "actors": []});
        let said = Ok((words.clone(), serde_json::from_value(words).unwrap()));
        // Nobody listens there.
        let other = Surveyed { name: "node-1".into(), http: "127.0.0.1:1".into(), member: None, said };
        let mut explained = explained();
        assert_eq!(explained.ask_others(std::slice::from_ref(&other)), [""; 0], "nothing is to be asked");
        explained.lookup.runs[1].outcome = "never_stored".into();
        let silent = explained.ask_others(&[other]);
        assert!(silent.len() == 1 && silent[0].starts_with("node-1: "), "{silent:?}");
    }

    #[test]
    fn an_explanation_names_each_run_with_its_reason() {
        let text = explained().table();
        assert!(
            text.starts_with("prefetch req-7 of tenant chat at node-0, device 0, ")
                && text.contains(" s ago: 1 of 6 chunks"),
            "{text}"
        );
        assert!(text.contains("1 to 3") && text.contains("by watermark, 60 s before, worth 12.2"), "{text}");
        assert!(text.contains("4 to 5"), "{text}");
    }

    #[test]
    fn a_list_counts_the_misses_of_each_lookup() {
        assert_eq!(explained().misses(), "evicted 3, behind_gap 2");
        assert!(list(&[explained()], Format::Table).contains("evicted 3, behind_gap 2"));
    }

    #[test]
    fn every_format_that_can_be_chosen_is_printed() {
        let all = [explained(), explained()];
        let headings = |text: String| text.lines().next().unwrap().to_owned();
        assert!(headings(list(&all, Format::Wide)).ends_with("trace"));
        assert!(headings(list(&all, Format::Tsv)).ends_with("\ttenant\tkind\ttrace"));
        assert_eq!(headings(held_table(&[], Format::Tsv)), "chunks\toutcome\ttier\tnode\tdetail");
        let tsv = tables(&all, Format::Tsv);
        assert!(tsv.lines().all(|line| line.matches('\t').count() == 4) && tsv.lines().count() == 7, "{tsv}");
    }

    #[test]
    fn ids_are_written_so_that_a_query_can_bear_them() {
        assert_eq!(encoded("cmpl-1 &x=ü"), "cmpl-1%20%26x%3D%C3%BC");
    }
}
