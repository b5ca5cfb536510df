# Statistics on whole numbers, one a line on standard input. Source this file.

# count prints how many numbers there are.
count() {
	n=0
	while read -r _; do
		n=$((n + 1))
	done
	echo "$n"
}

# sum adds the numbers up.
sum() {
	total=0
	while read -r number; do
		total=$((total + number))
	done
	echo "$total"
}

smallest() {
	sort -n | head -n 1
}

largest() {
	sort -n | tail -n 1
}

# median prints the number in the middle, the lower one where there are two.
median() {
	sorted=$(sort -n)
	n=$(echo "$sorted" | count)
	middle=$((n / 2))
	echo "$sorted" | head -n "$middle" | tail -n 1
}
