//! An engine in another process, in Python: its tensors are mapped by their handles, and what it would do without Larder is
//! measured beside.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

use anyhow::{Context as _, bail, ensure};
use larder_device::layout::{Shape, VllmOrder, vllm};
use larder_device::{Device as _, Direction, EngineMemory};

use crate::report::{Report, Wanted};
use crate::rig::Rig;

/// The engine; it answers a line to each line.
struct Engine {
    child: Child,
    answers: BufReader<ChildStdout>,
}

/// A handle, where the tensor begins in its allocation.
struct Shared {
    handle: String,
    offset: u64,
}

/// What an engine's pages hold comes back to it, in other pages, though the process that saved them was killed.
pub(crate) fn check(report: &mut Report) -> anyhow::Result<()> {
    let mut engine = match Engine::start() {
        Ok(engine) => engine,
        Err(error) => {
            report.notes.push(format!("no engine beside: {error}"));
            return Ok(());
        }
    };
    let (_, regions) = vllm(VllmOrder::Lbhnc, &SHAPE);
    let seed = report.seed % 1_000_000;
    let answer = engine.ask(&format!("share {} {seed}", regions[0]))?;
    let words: Vec<&str> = answer.split(' ').collect();
    let ["shared", handle, offset] = words[..] else {
        report.notes.push(format!("the engine's memory is not shared: {answer}"));
        return Ok(());
    };
    let shared = Shared { handle: handle.to_owned(), offset: offset.parse()? };
    let blocks = std::env::temp_dir().join(format!("larder-gpu-{}", std::process::id()));
    let result = there_and_back(&mut engine, &shared, &blocks);
    std::fs::remove_file(&blocks).ok();
    let what = "an engine's pages by its handle, the saver killed between";
    report.check(what, result.map_err(|error| format!("{error:#}")));
    Ok(())
}

fn there_and_back(engine: &mut Engine, shared: &Shared, blocks: &Path) -> anyhow::Result<()> {
    let copy = |what: &str| {
        let program = std::env::current_exe()?;
        let offset = shared.offset.to_string();
        let status = Command::new(program).args(["copy", what, &shared.handle, &offset]).arg(blocks).status();
        status.context("this program cannot be run again")
    };
    let saved = copy("save")?;
    ensure!(saved.code().is_none(), "the saver was to be killed, and ended with {saved}");
    engine.ask("poison")?;
    let loaded = copy("load")?;
    ensure!(loaded.success(), "the loader ended with {loaded}");
    let answer = engine.ask(&format!("compare {PAGES} {CHUNKS} {}", SHAPE.layers))?;
    ensure!(answer == "equal", "the engine says: {answer}");
    Ok(())
}

/// As another process: saves an engine's first pages to a file, or loads a file into its last pages. The saver kills itself.
pub(crate) fn copy(words: &[&str]) -> anyhow::Result<()> {
    let [what, handle, offset, blocks] = words[..] else { bail!("copy save|load HANDLE OFFSET FILE") };
    let (spec, regions) = vllm(VllmOrder::Lbhnc, &SHAPE);
    let mut rig = Rig::new(spec, &regions, CHUNKS, Rig::options(None))?;
    let mut bytes = [0; 64];
    for (byte, hex) in bytes.iter_mut().zip(handle.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(hex)?, 16)?;
    }
    let memory = EngineMemory::Ipc { handle: bytes, offset: offset.parse()?, bytes: regions[0] };
    let region = rig.device().import(memory)?;
    let layout = rig.layout.clone();
    rig.tensors = rig.device().register(layout, vec![region])?;
    let first: Vec<u32> = (0..CHUNKS as u32).collect();
    let last: Vec<u32> = (PAGES - CHUNKS as u32..PAGES).collect();
    let mut image = vec![0; rig.order_bytes() as usize];
    if what == "save" {
        rig.run(vec![rig.order(Direction::Save, false, rig.arena_region, &first)])?;
        rig.arena.read(0, &mut image);
        std::fs::write(blocks, &image)?;
        // As a node that is killed: nothing is given back.
        Command::new("kill").args(["-9", &std::process::id().to_string()]).status()?;
        bail!("nobody killed this process");
    }
    image = std::fs::read(blocks)?;
    rig.arena.write(0, &image);
    rig.run(vec![rig.order(Direction::Load, true, rig.arena_region, &last)])?;
    rig.close()
}

/// What an engine reaches by indexing and copying, and what copies beside it cost its matrix products.
pub(crate) fn beside(report: &mut Report, chunks: u64, layers: u32, pages: u32) -> anyhow::Result<()> {
    let Ok(mut engine) = Engine::start() else { return Ok(()) };
    let answer = engine.ask(&format!("index {chunks} {layers} {pages} {}", 16 * 8 * 512))?;
    for (word, what) in answer.split(' ').zip(["load", "save"]) {
        let rate: f64 = word.parse().with_context(|| format!("the engine says: {answer}"))?;
        report.measure(format!("torch indexing and a copy, {what}"), rate, "GB/s");
    }
    let alone: f64 = engine.ask("matrix")?.parse()?;
    let program = std::env::current_exe()?;
    let mut busy = Command::new(program).args(["busy", "12"]).spawn()?;
    // It opens the GPU and fills its memory first.
    engine.ask("wait 3")?;
    let together: f64 = engine.ask("matrix")?.parse()?;
    busy.wait()?;
    let of = ("without copies beside", alone);
    report.ratio("a matrix product with copies beside", together, "ms", of, Some(Wanted::AtMost(1.03)));
    Ok(())
}

impl Engine {
    /// # Errors
    /// Where there is no Python with PyTorch and a GPU; the reason is in the error.
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

const CHUNKS: u64 = 8;
const PAGES: u32 = 32;
const SHAPE: Shape =
    Shape { layers: 4, pages: PAGES, heads: 8, tokens: 16, content_bytes: 512, pages_per_chunk: 1 };
