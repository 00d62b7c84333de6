//! `larder events`: the chunks that nodes hold, gain and lose.

use std::io::ErrorKind;
use std::process::ExitCode;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;

use anyhow::{Context as _, anyhow, bail};
use serde::{Deserialize, Serialize};

use crate::failure::FAILED;
use crate::listing::Format;
use crate::survey::{Servers, Surveyed};
use crate::{http, output};

/// Print the chunks that nodes hold and, with --follow, each chunk that they gain or lose
///
/// The first lines are `held`, one for each chunk at the start; then come `admit` and `evict`. A reader that is too slow gets
/// `lagged`, and all chunks of the node again.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder events --node 127.0.0.1:9440          The chunks of one node
  larder events --follow                       The cluster's chunks, then every change, until Ctrl-C
  larder events --follow -o json | jq .hash    One JSON object a line

Fields: node, device, event, index of the chunk in its prompt, hash, parent, namespace, and for an eviction its reason: \
`watermark` (the cache is full), `need` or `clearing` (a block of another size or tenant needs the room).
Exit status: 1 if a node does not answer or is lost (`larder forget`), or its stream ends.")]
pub(crate) struct Args {
    #[command(flatten)]
    servers: Servers,

    /// Go on and print every change
    #[arg(short, long)]
    follow: bool,

    /// Output format: every format has one line for each event
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value_t, conflicts_with = "json")]
    output: Format,

    /// Print JSON: one object a line
    #[arg(long)]
    json: bool,
}

/// One printed line.
#[derive(Debug, Serialize)]
struct Line {
    node: String,
    event: String,
    #[serde(flatten)]
    chunk: Option<Chunk>,
}

/// The data of an event about a chunk.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Chunk {
    device: u16,
    namespace: String,
    hash: String,
    parent: String,
    index: u32,
    /// Why it was evicted: `watermark`, `need` or `clearing`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    evicted: Option<String>,
}

/// The end of a node's stream.
#[derive(Debug, PartialEq, Eq)]
enum Ended {
    /// The chunks at the start were told, and the user does not follow.
    Told,
    /// The reader was too slow.
    Lagged,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let survey = args.servers.targets()?.survey()?;
    let format = if args.json { Format::Json } else { args.output };
    let lost = survey.lost();
    lost.iter().for_each(|lost| output::note(format_args!("{lost}")));
    let (sender, lines) = sync_channel::<anyhow::Result<Line>>(WAITING_LINES);
    for node in survey.nodes {
        let (sender, follow) = (sender.clone(), args.follow);
        // The thread ends with its stream, or with the process.
        thread::spawn(move || {
            if let Err(error) = tell(&node, follow, &sender) {
                // An error means that the output is closed.
                let _ = sender.send(Err(error.context(node.name)));
            }
        });
    }
    drop(sender);
    let mut all_answer = lost.is_empty();
    for line in lines {
        match line {
            Ok(line) => {
                let text =
                    if format == Format::Json { serde_json::to_string(&line)? } else { line.text(format) };
                if !output::print_line(&text)? {
                    // The reader has gone, as `head` does.
                    break;
                }
            }
            Err(error) => {
                output::note(format_args!("error: {error:#}"));
                all_answer = false;
            }
        }
    }
    Ok(if all_answer { ExitCode::SUCCESS } else { ExitCode::from(FAILED) })
}

/// Sends a node's events until its stream ends.
fn tell(node: &Surveyed, follow: bool, sender: &SyncSender<anyhow::Result<Line>>) -> anyhow::Result<()> {
    if let Err(error) = &node.said {
        bail!("{error}");
    }
    let told = |event: &str, chunk| {
        let line = Line { node: node.name.clone(), event: event.to_owned(), chunk };
        sender.send(Ok(line)).context("the output is closed")
    };
    loop {
        let lines = http::get_lines(&node.http, "/events")?;
        if read(lines, follow, told)? == Ended::Told {
            return Ok(());
        }
    }
}

/// Reads server-sent events.
fn read(
    lines: impl Iterator<Item = std::io::Result<String>>,
    follow: bool,
    told: impl Fn(&str, Option<Chunk>) -> anyhow::Result<()>,
) -> anyhow::Result<Ended> {
    let mut event = String::new();
    for line in lines {
        let line = line.map_err(|error| match error.kind() {
            ErrorKind::TimedOut => anyhow!(
                "nothing came for {} s: the node hangs, or the network to it is cut (`larder status` says more)",
                http::SILENCE.as_secs()
            ),
            _ => anyhow!(error).context("the node's stream of events broke"),
        })?;
        if let Some(name) = line.strip_prefix("event: ") {
            event = name.to_owned();
        }
        let Some(data) = line.strip_prefix("data: ") else { continue };
        match event.as_str() {
            "live" if !follow => return Ok(Ended::Told),
            "live" => {}
            "lagged" => {
                told("lagged", None)?;
                return Ok(Ended::Lagged);
            }
            _ => told(&event, Some(serde_json::from_str(data).context("cannot read an event of the node")?))?,
        }
    }
    bail!("the node's stream of events ended: the node stopped")
}

impl Line {
    fn text(&self, format: Format) -> String {
        let Self { node, event, chunk } = self;
        let Some(Chunk { device, namespace, hash, parent, index, evicted }) = chunk else {
            return format!("{node}\t\t{event}");
        };
        match format {
            Format::Table => {
                let hash = hash.get(..SHORT_HASH).unwrap_or(hash);
                let why = evicted.as_ref().map_or(String::new(), |why| format!("\t{why}"));
                format!("{node}\t{device}\t{event}\t{index}\t{hash}{why}")
            }
            _ => {
                let why = evicted.as_deref().unwrap_or_default();
                format!("{node}\t{device}\t{event}\t{index}\t{hash}\t{parent}\t{namespace}\t{why}")
            }
        }
    }
}

/// Lines that wait to be printed; beyond this number the node waits.
const WAITING_LINES: usize = 1_024;

/// Digits of a hash in a short line.
const SHORT_HASH: usize = 16;

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    const STREAM: &str = "event: held\ndata: {\"device\":0,\"namespace\":\"n\",\"hash\":\"h\",\"parent\":\"p\",\"index\":3}\n\n\
        :\n\nevent: live\ndata: {}\n\nevent: evict\nid: 0:7\n\
        data: {\"device\":0,\"namespace\":\"n\",\"hash\":\"h\",\"parent\":\"p\",\"index\":3}\n\nevent: lagged\ndata: {}\n\n";

    fn events(text: &str, follow: bool) -> (Vec<String>, anyhow::Result<Ended>) {
        let seen = RefCell::new(Vec::new());
        let told = |event: &str, _: Option<Chunk>| {
            seen.borrow_mut().push(event.to_owned());
            Ok(())
        };
        let ended = read(text.lines().map(|line| Ok(line.to_owned())), follow, told);
        (seen.into_inner(), ended)
    }

    #[test]
    fn the_chunks_at_the_start_are_told_and_then_the_changes_when_they_are_wanted() {
        let (seen, ended) = events(STREAM, false);
        assert_eq!((seen, ended.unwrap()), (vec!["held".to_owned()], Ended::Told));
        let (seen, ended) = events(STREAM, true);
        assert_eq!(
            (seen, ended.unwrap()),
            (["held", "evict", "lagged"].map(str::to_owned).into(), Ended::Lagged)
        );
    }

    #[test]
    fn a_line_says_why_a_chunk_was_evicted() {
        let chunk = r#"{"device":0,"namespace":"n","hash":"h","parent":"p","index":3,"evicted":"need"}"#;
        let chunk = Some(serde_json::from_str(chunk).unwrap());
        let line = Line { node: "a".to_owned(), event: "evict".to_owned(), chunk };
        assert_eq!(line.text(Format::Table), "a\t0\tevict\t3\th\tneed");
        assert_eq!(line.text(Format::Tsv), "a\t0\tevict\t3\th\tp\tn\tneed");
    }

    #[test]
    fn a_stream_that_ends_or_is_garbage_is_an_error() {
        let stopped = events(&STREAM[..STREAM.find("event: lagged").unwrap()], true).1.unwrap_err();
        assert!(stopped.to_string().contains("the node stopped"), "{stopped}");
        assert!(events("event: held\ndata: {", true).1.is_err());
        let silent = read([Err(ErrorKind::TimedOut.into())].into_iter(), true, |_, _| Ok(())).unwrap_err();
        assert!(silent.to_string().contains("nothing came for 30 s"), "{silent}");
    }
}
