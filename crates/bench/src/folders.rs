//! Where a bench works, and where its results go.

use anyhow::Result;
use clap::Args;
use mica_tests::shell;
use serde_json::Value;
use std::fs;
use std::path::PathBuf;
use tempfile::TempDir;

// The folders of a bench. (Words for rustdoc would become the help of the bench.)
#[derive(Args)]
pub(super) struct Folders {
    /// Folder for the images, which are removed afterwards. A temporary one by default.
    #[arg(long)]
    work: Option<PathBuf>,
    /// Folder for the results.
    #[arg(long, default_value = "bench/results")]
    out: PathBuf,
}

impl Folders {
    /// An empty folder for images, removed with its contents on drop.
    ///
    /// # Errors
    /// If it cannot be created.
    pub(super) fn work(&self) -> Result<TempDir> {
        let mut builder = tempfile::Builder::new();
        builder.prefix("mica-bench-");
        let Some(folder) = &self.work else { return Ok(builder.tempdir()?) };
        fs::create_dir_all(folder)?;
        Ok(builder.tempdir_in(folder)?)
    }

    /// The folder for the results, created if it does not exist.
    ///
    /// # Errors
    /// If it cannot be created.
    pub(super) fn out(&self) -> Result<PathBuf> {
        let out = shell::root().join(&self.out);
        fs::create_dir_all(&out)?;
        Ok(out)
    }

    /// Writes the results as JSON and as a page, and prints the page.
    ///
    /// # Errors
    /// If they cannot be written.
    pub(super) fn put(&self, name: &str, document: &Value, page: &str) -> Result<()> {
        let out = self.out()?;
        let json = out.join(format!("{name}.json"));
        fs::write(&json, serde_json::to_vec_pretty(document)?)?;
        let md = out.join(format!("{name}.md"));
        fs::write(&md, page)?;
        println!("\n{page}\nwritten: {}, {}", md.display(), json.display());
        Ok(())
    }
}
