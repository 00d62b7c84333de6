//! `larder top`: the nodes' work, live.

use std::io::{self, IsTerminal as _};
use std::pin::pin;
use std::process::ExitCode;
use std::time::Duration;

use futures_util::stream::{self, StreamExt as _};
use tokio::task::spawn_blocking;
use tokio::time::{MissedTickBehavior, interval};

use crate::failure::FAILED;
use crate::survey::{Servers, Targets};
use crate::top::render::{Look, Sort, render};
use crate::top::sample::Sample;
use crate::top::terminal::{Key, Screen, keys};
use crate::top::view::View;
use crate::{output, signals, values};

/// Watch the nodes' work, live
///
/// Rates are those of the last interval: `in` counts bytes that engines commit, `out` bytes that are leased to engines. Keys: q
/// quits, s sorts by the next column, r reverses; arrows, or h, j, k and l, show other nodes and columns.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder top                                   The cluster of the context, or the newest development cluster
  larder top --coordinator 10.0.0.10:7600 --sort hit
  larder top --node 127.0.0.1:9440 --once      One interval, as text
  larder top --json --interval 10s             One interval, as one JSON object with `seconds`, `total` and `nodes`

Exit status: 1 if the coordinator, or every node, does not answer.")]
pub(crate) struct Args {
    #[command(flatten)]
    servers: Servers,

    /// Column by which nodes are sorted
    #[arg(long, value_enum, value_name = "COLUMN", default_value_t)]
    sort: Sort,

    /// Length of one interval
    #[arg(long, value_name = "TIME", value_parser = values::time, default_value = "1s")]
    interval: Duration,

    /// Show one interval and end [default if standard output is no terminal]
    #[arg(long)]
    once: bool,

    /// Print JSON: one interval
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let targets = args.servers.targets()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let look = Look::by(args.sort, false);
    let mut status = ExitCode::SUCCESS;
    if args.json || args.once || !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        let view = runtime.block_on(once(&targets, args.interval))?;
        if args.json {
            output::print_json(&view)?;
        } else {
            let text = render(&view, look, usize::MAX, usize::MAX);
            output::print(text.rsplit_once('\n').map_or(&*text, |(without_keys, _)| without_keys))?;
        }
        if !view.nodes.is_empty() && view.nodes.iter().all(|node| node.numbers.is_none()) {
            output::note(format_args!("no node answers: `larder status` says why"));
            status = ExitCode::from(FAILED);
        }
    } else {
        runtime.block_on(watch(&targets, args.interval, look))?;
    }
    // Does not wait for a sample that is under way.
    runtime.shutdown_background();
    Ok(status)
}

async fn once(targets: &Targets, interval: Duration) -> anyhow::Result<View> {
    let before = sample(targets).await?;
    tokio::time::sleep(interval).await;
    Ok(View::between(&before, &sample(targets).await?))
}

async fn watch(targets: &Targets, every: Duration, mut look: Look) -> anyhow::Result<()> {
    let mut stop = pin!(signals::stop()?);
    let mut before = tokio::select! {
        before = sample(targets) => before?,
        () = &mut stop => return Ok(()),
    };
    let mut view = View::between(&before, &before);
    let mut keys = keys();
    let mut ticks = interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // The first tick comes at once.
    ticks.tick().await;
    // A silent node delays a sample for seconds; keys and signals are obeyed meanwhile.
    let mut samples = pin!(stream::unfold(ticks, |mut ticks| async {
        ticks.tick().await;
        Some((sample(targets).await, ticks))
    }));
    let screen = Screen::open()?;
    loop {
        let (columns, rows) = screen.size();
        screen.draw(&render(&view, look, columns, rows))?;
        tokio::select! {
            () = &mut stop => return Ok(()),
            Some(key) = keys.recv() => match key {
                Key::Quit => return Ok(()),
                Key::Sort => look.order = look.order.next(),
                Key::Reverse => look.order.reversed = !look.order.reversed,
                Key::Scroll(rows) => look.scroll(rows, view.nodes.len()),
                Key::Pan(columns) => look.pan(columns),
            },
            Some(sampled) = samples.next() => match sampled {
                Ok(after) => {
                    view = View::between(&before, &after);
                    before = after;
                }
                // A coordinator may restart meanwhile.
                Err(error) => view.trouble = Some(format!("{error:#}")),
            },
        }
    }
}

async fn sample(targets: &Targets) -> anyhow::Result<Sample> {
    let targets = targets.clone();
    spawn_blocking(move || Sample::of(&targets)).await?
}
