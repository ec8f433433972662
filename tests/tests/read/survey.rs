//! `mica survey` of a fleet that was made after published figures shows these figures.

use mica_gen::{FleetSpec, generate_fleet};
use mica_tests::{command, mica, qemu, tools};
use serde_json::Value;
use std::fs;
use std::ops::RangeInclusive;
use std::path::Path;
use std::process::Command;

#[track_caller]
fn fleet(dir: &Path, chains: u64) -> Value {
    let spec = FleetSpec { dir: dir.to_owned(), chains, seed: 1 };
    let fleet = generate_fleet(&spec, |_| {}).expect("made");
    let survey = survey(dir);
    assert_eq!(survey["images"], fleet.images);
    assert_eq!(survey["longest"], fleet.longest);
    assert_eq!(survey["problems"].as_array().map(Vec::len), Some(0), "{}", survey["problems"]);
    survey
}

#[track_caller]
fn survey(dir: &Path) -> Value {
    mica::run(["survey", "--output", "json", &dir.display().to_string()]).json()
}

/// The share of `counts` whose `key` is in `range`, in percent.
#[track_caller]
fn percent(counts: &Value, key: &str, range: RangeInclusive<u64>) -> u64 {
    let counts = counts.as_array().expect("counts");
    let number = |one: &Value, key: &str| one[key].as_u64().expect("a number");
    let sum = |wanted: &RangeInclusive<u64>| -> u64 {
        let counted = counts.iter().filter(|one| wanted.contains(&number(one, key)));
        counted.map(|one| number(one, "count")).sum()
    };
    sum(&range) * 100 / sum(&(0..=u64::MAX)).max(1)
}

#[test]
fn generated_fleet_has_the_published_figures() {
    let dir = tempfile::tempdir().expect("a folder");
    let survey = fleet(dir.path(), 2000);
    let [chains, files] = ["chains", "files"].map(|kind| &survey["lengths"][kind]);
    for (what, counts, range, expected) in [
        ("chains of at most 10", chains, 1..=10, 80..=84),
        ("files of chains of at most 10", files, 1..=10, 43..=55),
        ("chains of 30 to 35", chains, 30..=35, 9..=11),
        ("files of chains of 30 to 35", files, 30..=35, 21..=29),
        ("chains of 100 and more", chains, 100..=u64::MAX, 0..=1),
        ("files of chains of 100 and more", files, 100..=u64::MAX, 3..=15),
    ] {
        let found = percent(counts, "length", range);
        assert!(expected.contains(&found), "{what}: {found}%, published: {expected:?}");
    }
    assert!(survey["longest"].as_u64().is_some_and(|longest| longest >= 1000));
    // Many degrees of sharing, from none to nearly all.
    let degrees = survey["sharing"].as_array().expect("a list");
    let number = |one: &Value, key: &str| one[key].as_u64().expect("a number");
    let streamed = || degrees.iter().filter(|one| (30..=35).contains(&number(one, "length")));
    let shared: Vec<u64> = streamed().map(|one| number(one, "shared")).collect();
    assert!(shared.contains(&0) && shared.iter().any(|shared| *shared >= 25), "{shared:?}");
    // Most snapshots are in chains of less than 30, and many are daily or more often.
    assert!(percent(&survey["snapshots"], "position", 0..=29) >= 70);
    let often = survey["snapshots"].as_array().expect("a list").iter();
    let often = often.filter(|one| one["elapsed"] == "hour" || one["elapsed"] == "day");
    let often: u64 = often.map(|one| number(one, "count")).sum();
    let all = survey["snapshots"].as_array().expect("a list").iter();
    let all: u64 = all.map(|one| number(one, "count")).sum();
    assert!((45..=75).contains(&(often * 100 / all)), "{often} of {all}");
}

#[test]
fn disks_of_providers_and_customers_have_the_published_sizes() {
    let dir = tempfile::tempdir().expect("a folder");
    fleet(dir.path(), 600);
    for (folder, gib, expected) in [("first", 10, 20..=40), ("third", 50, 32..=48)] {
        let survey = survey(&dir.path().join(folder));
        let size = gib << 30;
        let found = percent(&survey["sizes"]["active"], "virtual-size", size..=size);
        assert!(expected.contains(&found), "{folder}: {found}% of {gib} GiB");
        // What they stand on is in another folder.
        assert!(survey["suffering-chains"].as_u64().is_some_and(|count| count > 0));
    }
}

#[test]
fn images_of_a_fleet_are_images() {
    if !tools::present(&[tools::QEMU_IMG]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    fleet(dir.path(), 20);
    let mut folders = vec![dir.path().to_owned()];
    let mut checked = 0;
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("listed") {
            let path = entry.expect("listed").path();
            if path.is_dir() {
                folders.push(path);
            } else if checked < 40 {
                let name = path.display().to_string();
                qemu::img(&folder, ["check", "-q", "-f", "qcow2", &name]).ok();
                qemu::img(&folder, ["info", "--backing-chain", "-f", "qcow2", &name]).ok();
                checked += 1;
            }
        }
    }
    assert_eq!(checked, 40);
}

#[test]
fn page_has_all_figures_and_loads_nothing() {
    let dir = tempfile::tempdir().expect("a folder");
    let images = dir.path().join("a<b>");
    fleet(&images, 60);
    let page = dir.path().join("survey.html");
    let [images, file] = [&images, &page].map(|path| path.display().to_string());
    let said = mica::run(["survey", "--html", &file, &images]).ok();
    assert!(said.contains("chains suffer"), "{said}");
    let page = fs::read_to_string(page).expect("written");
    assert_eq!(page.matches("<svg ").count(), 5);
    for figure in 4..=9 {
        let is_there = page.contains(&format!("figure {figure}"))
            || page.contains(&format!("and {figure}"))
            || page.contains(&format!("figures {figure}"));
        assert!(is_there, "figure {figure}");
    }
    for foreign in ["<script", "<link", "<img", "url(", "@import", "a<b>"] {
        assert!(!page.contains(foreign), "{foreign}");
    }
    assert_eq!(page.matches("<title>").count(), 6, "every picture says what it shows");
    assert!(page.contains("prefers-color-scheme:dark") && page.contains("lang=\"en\""));
    let refused = mica::run(["survey", "--html", &format!("{images}/none/x.html"), &images]);
    assert!(refused.refusal().contains("none"));
}

#[test]
fn folder_without_images_has_a_survey_and_a_page_too() {
    let dir = tempfile::tempdir().expect("a folder");
    assert_eq!(survey(dir.path())["images"], 0);
    let page = dir.path().join("survey.html").display().to_string();
    let said = mica::run(["survey", "--html", &page, &dir.path().display().to_string()]).ok();
    assert!(said.starts_with("0 images in 0 chains"), "{said}");
    assert!(!fs::read_to_string(page).expect("written").contains("NaN"));
}

/// The story: a disk that was named instead of a page was overwritten.
#[test]
fn page_replaces_nothing_but_a_page() {
    let dir = tempfile::tempdir().expect("a folder");
    let folder = dir.path().display().to_string();
    let at = |name: &str| dir.path().join(name);
    let survey =
        |name: &str| mica::run(["survey", "--html", &at(name).display().to_string(), &folder]);
    mica::run(["create", "-q", &at("disk.qcow2").display().to_string(), "1M"]).ok();
    let disk = fs::read(at("disk.qcow2")).expect("there");
    let another = b"<!DOCTYPE html>\n<html lang=\"en\"><head><title>Mine</title>";
    let others = [("disk.qcow2", &*disk), ("another.html", another), ("notes.html", b"<p>mine")];
    for (name, content) in others {
        fs::write(at(name), content).expect("written");
        let said = survey(name).refusal();
        assert!(said.contains("name another file"), "{said}");
        assert_eq!(fs::read(at(name)).expect("there"), content, "{name}");
    }
    survey("page").ok();
    let first = fs::read(at("page")).expect("there");
    // As `mktemp` makes one.
    fs::write(at("empty"), "").expect("written");
    survey("empty").ok();
    assert!(fs::read(at("empty")).expect("there").starts_with(b"<!DOCTYPE html>"));
    std::os::unix::fs::symlink("page", at("link")).expect("linked");
    survey("link").ok();
    assert!(at("link").is_symlink());
    assert!(fs::read(at("page")).expect("there").starts_with(b"<!DOCTYPE html>"));
    assert!(first.starts_with(b"<!DOCTYPE html>"));
    let count = dir.path().read_dir().expect("listed").count();
    assert_eq!(count, 6, "nothing else is left");
}

/// The page goes where the text goes, which may be a file that has something already.
#[test]
fn page_is_written_to_standard_output() {
    let dir = tempfile::tempdir().expect("a folder");
    let [output, images] = ["output", "images"].map(|name| dir.path().join(name));
    fs::write(&output, "before\n").expect("written");
    fs::create_dir(&images).expect("made");
    let script = r#""$mica" survey --html /dev/stdout "$folder" >> "$output""#;
    let mut shell = Command::new("sh");
    shell.args(["-c", script]).env("mica", mica::binary());
    command::finish(shell.env("folder", &images).env("output", &output)).ok();
    let text = fs::read_to_string(&output).expect("there");
    let page = text.strip_prefix("before\n").expect("it is appended");
    assert!(page.starts_with("<!DOCTYPE html>") && page.contains("</html>\n0 images in"), "{text}");
    let piped = mica::run(["survey", "--html", "/dev/stdout", &images.display().to_string()]);
    assert!(piped.ok().starts_with("<!DOCTYPE html>"));
}
