//! What is said of a disk that is not there: which there are, in a line that can be read however
//! many they are.

use crate::config::similar;

/// Names of disks that a message lists.
const LISTED_MAX: usize = 12;

/// The message for a disk called `name`, where those of the names `there` are served.
pub fn no_disk(name: &str, there: &[String]) -> String {
    if there.is_empty() {
        return format!("no disk {name:?}: this server has no disks");
    }
    if there.len() <= LISTED_MAX {
        return format!("no disk {name:?}; disks are: {}", there.join(", "));
    }
    let hint = similar(name, there).map(|near| format!(", {near} for one")).unwrap_or_default();
    let count = there.len();
    format!("no disk {name:?}; there are {count} others{hint}: `mica ctl status` lists them")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_are_listed_unless_they_are_many() {
        let names = |count: usize| (0..count).map(|number| format!("web{number}"));
        let names = |count| names(count).collect::<Vec<_>>();
        assert_eq!(no_disk("x", &names(0)), "no disk \"x\": this server has no disks");
        assert_eq!(no_disk("x", &names(2)), "no disk \"x\"; disks are: web0, web1");
        assert_eq!(
            no_disk("web1000", &names(1000)),
            "no disk \"web1000\"; there are 1000 others, web100 for one: `mica ctl status` lists them"
        );
        let far = no_disk("database", &names(13));
        assert!(far.contains("there are 13 others: `mica"), "{far}");
    }
}
