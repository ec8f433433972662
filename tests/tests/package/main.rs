//! What a user of the program finds before it serves anything: help, man pages, completions, and
//! the Debian package that has them.

mod deb;
mod docs;
mod examples;
mod help;
mod manual;
