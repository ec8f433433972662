//! Power cuts beneath verbs that replace a file: it is the old one or the new one, and the new one
//! once the verb has said so.

use anyhow::{Context as _, Result, ensure};
use mica_gen::Rng;
use mica_tests::mounts::Mount;
use mica_tests::power::{self, Disk, Recorder, Recording};
use mica_tests::{mica, tools};
use std::fs;
use std::path::Path;

/// How often the file is replaced, and how many states of the disk are judged.
const TIMES: u8 = 8;
const CUTS: usize = 60;

/// What the file was after each run, and how long the log was when that had ended.
type Generations = Vec<(Vec<u8>, u64)>;

/// The story: the power went when `mica convert --force` had succeeded, and the old image, whose
/// blocks others had by then, was there again.
#[test]
fn file_that_was_replaced_is_the_new_one_after_a_power_cut() {
    let needed = [tools::QEMU_STORAGE_DAEMON, tools::NBDFUSE, tools::MKE2FS];
    if !tools::present(&needed) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    if let Some(lack) = power::lacks(dir.path()) {
        return tools::skip(&lack);
    }
    replace_and_cut(dir.path()).expect("one of them");
}

fn replace_and_cut(dir: &Path) -> Result<()> {
    let recorder = Recorder::start(dir, 4096)?;
    let disk = recorder.folder().join("disk");
    let source = dir.join("source.raw");
    fs::write(&disk, vec![0xff; 200 << 10])?;
    let from = recorder.sync()?;
    let mut generations = vec![(fs::read(&disk)?, from)];
    for number in 1..=TIMES {
        fs::write(&source, vec![number; 300 << 10])?;
        let to = if number % 2 == 0 { "raw" } else { "qcow2" };
        let (source, disk) = (source.display().to_string(), disk.display().to_string());
        mica::run(["convert", "-q", "--force", "-f", "raw", "-O", to, &source, &disk]).ok();
        let end = recorder.log().metadata()?.len();
        generations.push((fs::read(&disk)?, end));
    }
    let Recording { before, log } = recorder.stop()?;
    let mut rng = Rng::new(21);
    let places = power::places(&log, from, CUTS, &mut rng)?;
    let mut cut_disk = Disk::new(before, &log);
    let mut late = 0;
    for (end, cut) in places {
        cut_disk.advance(end)?;
        let survivors = cut_disk.cut(cut, &mut rng);
        let file = dir.join("crash.img");
        cut_disk.lay_down(&survivors, &file)?;
        let told = generations.iter().filter(|(_, end)| *end <= cut_disk.log_len()).count() - 1;
        late += usize::from(told > 0);
        judge(&file, &generations, told).with_context(|| format!("{cut:?} at entry {end}"))?;
    }
    ensure!(late > 0, "no cut after a success");
    Ok(())
}

fn judge(file: &Path, generations: &Generations, told: usize) -> Result<()> {
    let ext4 = Mount::ext4(file, &file.with_extension("mounted")).context("the file system")?;
    let found = fs::read(ext4.folder().join("disk"));
    ext4.unmount();
    let found = found.context("it is there")?;
    let which = generations.iter().position(|(content, _)| *content == found);
    let which = which.context("a part of one")?;
    ensure!(which >= told, "generation {which}, and {told} was there when the verb ended");
    Ok(())
}
