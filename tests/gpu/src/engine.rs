//! An engine in another process, in Python: a node maps its tensors by their handles. For comparison, the same copies are
//! measured without Larder.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::fd::AsFd as _;
use std::process::{Child, ChildStdout, Command, Stdio};

use anyhow::{Context as _, ensure};
use larder_device::cuda::Form;
use larder_device::layout::{Shape, VllmOrder, vllm};
use larder_device::{EngineMemory, HostMemory, PagedLayout};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::node;
use crate::report::{Report, Wanted};

/// The engine; it answers each line with a line.
struct Engine {
    child: Child,
    answers: BufReader<ChildStdout>,
}

/// Checks that an engine's pages come back from a node into other pages, although the node was killed in between. If there is no
/// PyTorch with a GPU, and `small` is requested, host memory stands in for the engine's memory.
pub(crate) fn check(report: &mut Report, small: bool) -> anyhow::Result<()> {
    let (spec, regions) = vllm(VllmOrder::Lbhnc, &SHAPE);
    let layout = PagedLayout::new(spec, &regions)?;
    let seed = report.seed % 1_000_000;
    let (what, result) = match Engine::start() {
        Ok(mut engine) => {
            let answer = engine.ask(&format!("share {} {seed}", regions[0]))?;
            let words: Vec<&str> = answer.split(' ').collect();
            let ["shared", handle, offset] = words[..] else {
                report.notes.push(format!("the engine's memory is not shared: {answer}"));
                return Ok(());
            };
            let shared = (unhex(handle)?, offset.parse()?);
            (
                "an engine's pages by its handle, the node killed between",
                by_handle(&mut engine, shared, &layout),
            )
        }
        Err(_) if small => ("pages of shared memory, the node killed between", by_descriptor(&layout, seed)),
        Err(error) => {
            report.notes.push(format!("no engine beside: {error}"));
            return Ok(());
        }
    };
    report.check(what, result.map_err(|error| format!("{error:#}")));
    Ok(())
}

fn by_handle(engine: &mut Engine, shared: ([u8; 64], u64), layout: &PagedLayout) -> anyhow::Result<()> {
    let (handle, offset) = shared;
    let bytes = region_bytes(layout);
    let memory = || Ok(EngineMemory::Ipc { handle, offset, bytes });
    node::there_and_back(layout, CHUNKS, memory, || engine.ask("poison").map(drop))?;
    let answer = engine.ask(&format!("compare {PAGES} {CHUNKS} {}", SHAPE.layers))?;
    ensure!(answer == "equal", "the engine says: {answer}");
    Ok(())
}

fn by_descriptor(layout: &PagedLayout, seed: u64) -> anyhow::Result<()> {
    let bytes = region_bytes(layout);
    let file = memfd_create("engine", MemfdFlags::CLOEXEC)?;
    ftruncate(&file, bytes)?;
    let engine = HostMemory::map(file.as_fd(), bytes)?;
    let mut random = fastrand::Rng::with_seed(seed);
    let before: Vec<u8> = std::iter::repeat_with(|| random.u8(..)).take(bytes as usize).collect();
    engine.write(0, &before);
    let memory = || Ok(EngineMemory::Descriptor { descriptor: file.try_clone()?, bytes });
    let poison = || {
        engine.write(0, &vec![POISON; bytes as usize]);
        Ok(())
    };
    node::there_and_back(layout, CHUNKS, memory, poison)?;
    let mut after = vec![0; bytes as usize];
    engine.read(0, &mut after);
    for (layer, (after, before)) in pages_of_layers(&after).zip(pages_of_layers(&before)).enumerate() {
        let loaded = (PAGES - CHUNKS) as usize;
        ensure!(after[loaded..] == before[..CHUNKS as usize], "layer {layer} has other bytes than it had");
        let untouched = after[..loaded].iter().all(|page| page.iter().all(|&byte| byte == POISON));
        ensure!(untouched, "pages of layer {layer} were written that should not have been");
    }
    Ok(())
}

/// The pages of each layer, in the order of the region.
fn pages_of_layers(region: &[u8]) -> impl Iterator<Item = Vec<&[u8]>> {
    let layer = region.len() / SHAPE.layers as usize;
    region.chunks(layer).map(move |pages| pages.chunks(layer / PAGES as usize).collect())
}

fn region_bytes(layout: &PagedLayout) -> u64 {
    layout.page_bytes() * u64::from(PAGES) * u64::from(layout.layers())
}

fn unhex(text: &str) -> anyhow::Result<[u8; 64]> {
    let mut bytes = [0; 64];
    ensure!(text.len() == 2 * bytes.len(), "a handle has 64 bytes");
    for (byte, hex) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(hex)?, 16)?;
    }
    Ok(bytes)
}

/// The speed of an engine's own indexing and copying, and the slowdown of its matrix products by other copies.
pub(crate) fn beside(report: &mut Report, chunks: u64, layers: u32, pages: u32) -> anyhow::Result<()> {
    let Ok(mut engine) = Engine::start() else { return Ok(()) };
    let answer = engine.ask(&format!("index {chunks} {layers} {pages} {}", 16 * 8 * 512))?;
    for (word, what) in answer.split(' ').zip(["load", "save"]) {
        let rate: f64 = word.parse().with_context(|| format!("the engine says: {answer}"))?;
        report.measure(format!("torch indexing and a copy, {what}"), rate, "GB/s");
    }
    let program = std::env::current_exe()?;
    for form in Form::ALL {
        let alone: f64 = engine.ask("matrix")?.parse()?;
        let mut busy = Command::new(&program).args(["busy", "6", &format!("{form:?}")]).spawn()?;
        // The busy process opens the GPU and fills its memory first.
        engine.ask("wait 3")?;
        let together: f64 = engine.ask("matrix")?.parse()?;
        busy.wait()?;
        let of = ("without copies beside", alone);
        let what = format!("a matrix product with another process's copies beside, {form:?}");
        report.ratio(what, together, "ms", of, Some(Wanted::AtMost(1.03)));
    }
    Ok(())
}

impl Engine {
    /// # Errors
    /// Fails if there is no Python with PyTorch and a GPU; the reason is in the error.
    fn start() -> anyhow::Result<Self> {
        let mut child = Command::new("python3")
            .args(["-c", PROGRAM])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .context("there is no python3")?;
        let answers = BufReader::new(child.stdout.take().context("no output")?);
        let mut engine = Self { child, answers };
        let greeting = engine.answer()?;
        ensure!(greeting == "ready", "Python says: {greeting}");
        Ok(engine)
    }

    fn ask(&mut self, line: &str) -> anyhow::Result<String> {
        let input = self.child.stdin.as_mut().context("no input")?;
        writeln!(input, "{line}")?;
        input.flush()?;
        self.answer()
    }

    fn answer(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        ensure!(self.answers.read_line(&mut line)? > 0, "Python ended");
        Ok(line.trim().to_owned())
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        if self.child.wait().is_err() {
            self.child.kill().ok();
        }
    }
}

const PROGRAM: &str = include_str!("../engine.py");

const CHUNKS: u32 = 8;
const PAGES: u32 = 32;
const POISON: u8 = 0xA5;
const SHAPE: Shape =
    Shape { layers: 4, pages: PAGES, heads: 8, tokens: 16, content_bytes: 512, pages_per_chunk: 1 };
